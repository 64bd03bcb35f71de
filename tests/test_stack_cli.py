"""`postgrad stack`: what it lists, and how it refuses to run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from apis.common import Api
from distributions.cli.stack import app
from providers.registry import BUILT_IN, find_spec
from providers.torchtune.architecture import Family
from tests.model_fixture import REPOSITORY

TEMPLATE = "experimental-post-training"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder that does not exist yet; the environment is put back afterwards."""
    # `run --env` writes to the environment of its process, which here is the tests'.
    unset = ("POSTGRAD_API_KEY", "POSTGRAD_PORT", "LLAMA_STACK_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    monkeypatch.setattr(os, "environ", {**kept, "POSTGRAD_HOME": str(tmp_path / "home")})
    return tmp_path / "home"


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def run_yaml(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def test_templates_are_listed_with_what_they_are_for():
    code, out, _ = invoke("list-templates")
    assert code == 0
    assert f"{TEMPLATE}\tFine-tune and serve on one machine: torchtune trains, transformers answers." in out


def test_apis_are_listed():
    assert invoke("list-apis")[1].split() == [api.value for api in Api]
    assert json.loads(invoke("list-apis", "--json")[1]) == [{"api": api.value} for api in Api]


def test_providers_are_listed_all_or_those_of_one_api():
    everything = json.loads(invoke("list-providers", "--json")[1])
    assert {(p["api"], p["provider_type"]) for p in everything} >= {(s.api.value, s.provider_type) for s in BUILT_IN}
    (torchtune,) = [p for p in everything if p["provider_type"] == "inline::torchtune"]
    assert torchtune["capabilities"].split(", ")[:2] == ["supervised_fine_tune", "preflight"]
    one = invoke("list-providers", "post_training")[1].splitlines()
    assert "inline::torchtune" in [line.split("\t")[1] for line in one]
    assert {line.split("\t")[0] for line in one} == {"post_training"}
    assert {"Full", "LoRA"} <= set(one[1].split("\t")[3].split(", "))


def test_the_page_of_providers_is_what_the_code_says():
    code, out, _ = invoke("list-providers", "--markdown")
    assert code == 0
    page = (REPOSITORY / "docs" / "providers.md").read_text(encoding="utf-8")
    assert page == out, "run `make docs`"
    for spec in BUILT_IN:
        assert f"### {spec.provider_type}\n" in out
        assert all(f"`{can}`" in out for can in spec.capabilities)


def test_the_models_that_torchtune_is_said_to_train_are_those_that_it_knows():
    assert find_spec(Api.post_training, "inline::torchtune").model_types == get_args(Family)


def test_an_unknown_api_is_answered_with_the_known_ones():
    code, out, err = invoke("list-providers", "agents")
    assert (code, out) == (1, "")
    assert err.startswith("Error: there is no API 'agents'")
    assert "post_training" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nproviders: [", "line 2, column"),
        ("version: 7", "version: "),
        ("image_name: ${env.NOT_SET_ANYWHERE}", "needs the environment variable NOT_SET_ANYWHERE"),
        ("providers: {inference: [{provider_id: a, provider_type: inline::nothing}]}", "inline::transformers"),
        ("providers: {datasetio: [{provider_id: a, provider_type: inline::localfs, config: {x: 1}}]}", "config.x: "),
        ("logging: {category_levels: {all: LOUD}}", "no level 'LOUD'"),
        ("server: {host: 0.0.0.0}", "POSTGRAD_API_KEY"),
        ("server: {host: 203.0.113.7, api_key: a-key-beyond-guessing, port: 0}", "cannot serve on 203.0.113.7"),
    ],
)
def test_a_stack_that_cannot_run_is_refused_and_leaves_nothing(home: Path, text: str, message: str):
    code, out, err = invoke("run", run_yaml(home.parent, text))
    assert (code, out) == (1, "")
    assert message in next(line for line in err.splitlines() if line.startswith("Error: "))
    assert "Traceback" not in err
    assert not home.exists()


def test_an_unknown_template_is_refused_with_the_known_ones(home: Path):
    code, _, err = invoke("run", "no-such-template")
    assert code == 1
    assert TEMPLATE in err
    assert not home.exists()


def test_a_busy_port_is_refused_with_the_remedy(home: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, _, err = invoke("run", TEMPLATE, "--port", port)
    assert code == 1
    assert f"port {port}" in err
    assert "--port" in err
    assert not home.exists()


@pytest.mark.parametrize("variable", ["POSTGRAD_PORT", "LLAMA_STACK_PORT"])
def test_the_port_may_come_from_the_environment(home: Path, variable: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        os.environ[variable] = str(port)
        code, _, err = invoke("run", TEMPLATE)
    assert code == 1
    assert f"port {port} on 127.0.0.1 cannot be taken" in err


def test_env_options_reach_the_run_yaml(home: Path):
    text = "image_name: x\nserver: {port: '${env.MY_PORT}'}"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = invoke("run", run_yaml(home.parent, text), "--env", f"MY_PORT={port}")
    assert code == 1
    assert f"port {port} on 127.0.0.1 cannot be taken" in err


def test_a_malformed_env_option_is_refused(home: Path):
    code, _, err = invoke("run", TEMPLATE, "--env", "NOVALUE")
    assert code == 1
    assert "NAME=VALUE" in err
