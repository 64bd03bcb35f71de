"""run.yaml files as users of every Llama Stack from 0.1 to 0.6 have them: what is understood, left out and refused."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy.engine import make_url

from apis.common import Api
from apis.errors import EnvironmentUnset, ProviderInvalid, RunConfigInvalid
from distributions.resolver import plan
from distributions.run_config import StackRunConfig, load_run_config
from distributions.stack import build_stack
from tests.served_stack import served

FOLDER = Path(__file__).parent / "data" / "run_yamls"
ENVIRON = {"HOME": "/home/user"}
TRAINED = "inline::torchtune"
ANSWERED = "inline::transformers"
READ = {"inline::localfs", "remote::huggingface"}

OLD_APIS = ["agents", "eval", "vector_io", "safety", "scoring", "telemetry", "tool_runtime"]
NEW_APIS = ["agents", "batches", "eval", "files", "safety", "scoring", "tool_runtime", "vector_io"]


def apis(names: list[str]) -> list[str]:
    return [f"API {name!r}" for name in names]


# For each file: the types of ours that it comes down to, and what its warnings name, one each.
GENERATIONS: dict[str, tuple[set[str], list[str]]] = {
    "v0.1.0": (
        {TRAINED, ANSWERED, *READ},
        ["'conda_env'", *apis(OLD_APIS)],
    ),
    "v0.1.9": (
        {TRAINED, ANSWERED, *READ},
        [
            "'conda_env'",
            "'tool_groups'",
            *apis(OLD_APIS),
        ],
    ),
    "v0.2.12": (
        {"inline::huggingface", ANSWERED, *READ},
        [
            "'conda_env'",
            "'inference_store'",
            "'remote::ollama'",
            *apis(OLD_APIS),
        ],
    ),
    "v0.2.20": (
        {TRAINED, ANSWERED, *READ},
        [
            "'inference_store'",
            "'shields'",
            "'tool_groups'",
            "'remote::openai'",
            "'inline::sentence-transformers'",
            "models.0 is left out, since there is no provider 'sentence-transformers'",
            *apis([*NEW_APIS, "telemetry"]),
        ],
    ),
    "v0.3.5": (
        {TRAINED, ANSWERED, *READ},
        [
            "storage.stores: only metadata is used here; left out: conversations, inference",
            "'registered_resources.shields'",
            "'telemetry'",
            "server.workers",
            *apis(NEW_APIS),
        ],
    ),
    "v0.6.1": (
        {TRAINED, ANSWERED, *READ},
        [
            "storage.stores: only metadata is used here; left out: connectors, conversations, inference, prompts",
            "'remote::bedrock'",
            "section 'vector_stores'",
            "section 'safety'",
            *apis(NEW_APIS),
        ],
    ),
}


def load(tmp_path: Path, document: Any, **environ: str) -> StackRunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_run_config(str(path), {**ENVIRON, **environ})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings of `distributions`, as they come."""
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, "distributions"):
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
        logging.getLogger("distributions").addHandler(handler)
        yield messages
        logging.getLogger("distributions").removeHandler(handler)


def test_every_generation_has_its_file():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(GENERATIONS)


@pytest.mark.parametrize("name", GENERATIONS)
def test_each_generation_is_understood_with_one_warning_for_each_thing_that_is_not_ours(name: str, warnings: list[str]):
    types, foreign = GENERATIONS[name]
    config = load_run_config(str(FOLDER / f"{name}.yaml"), ENVIRON)
    assert {p.spec.provider_type for p in plan(config)} == types
    assert config.image_name == ("starter" if name == "v0.2.20" else "experimental-post-training")
    assert [sum(what in message for message in warnings) for what in foreign] == [1] * len(foreign)
    assert len(warnings) == len(foreign), warnings


@pytest.mark.parametrize("name", GENERATIONS)
def test_each_generation_is_served(name: str, tmp_path: Path):
    store, log = tmp_path / "store", tmp_path / "log"
    with (
        log.open("w") as errors,
        served(tmp_path / "home", stack=str(FOLDER / f"{name}.yaml"), stderr=errors, SQLITE_STORE_DIR=str(store)) as (
            url,
            _,
        ),
    ):
        assert httpx.get(f"{url}/v1/health").json() == {"status": "OK"}
        providers = httpx.get(f"{url}/v1/providers").json()["data"]
        jobs = httpx.get(f"{url}/v1alpha/post-training/jobs").status_code
        datasets = [d["identifier"] for d in httpx.get(f"{url}/v1/datasets").json()["data"]]
    assert {p["provider_type"] for p in providers} == GENERATIONS[name][0]
    assert {p["health"]["status"] for p in providers} == {"OK"}
    assert jobs == 200
    assert datasets == (["two-rows"] if name == "v0.3.5" else [])
    assert [file.name for file in store.iterdir() if file.suffix == ".db"] == [
        "kvstore.db" if name >= "v0.3" else "registry.db"
    ]
    assert "Traceback" not in log.read_text()


def test_a_provider_that_is_left_out_needs_no_variables(tmp_path: Path, warnings: list[str]):
    entries = [
        {"provider_id": "nv", "provider_type": "remote::nvidia", "config": {"api_key": "${env.NOT_SET}"}},
        {"provider_id": "tune", "provider_type": "${env.KIND:=inline::torchtune-cpu}"},
    ]
    config = load(tmp_path, {"providers": {"post_training": entries}})
    assert [(e.enabled, e.provider_id) for e in config.providers[Api.post_training]] == [
        (False, "__disabled__"),
        (True, "tune"),
    ]
    assert len(warnings) == 1
    assert "providers.post_training.0 is left out: 'remote::nvidia'" in warnings[0]
    assert "; it has inline::huggingface, inline::torchtune, " in warnings[0]


@pytest.mark.parametrize("place", ["models", "registered_resources"])
def test_models_and_data_sets_of_a_provider_that_is_left_out_need_no_variables(
    tmp_path: Path, warnings: list[str], place: str
):
    models = [
        {"model_id": "${env.NOT_SET}", "provider_id": "ollama"},
        {"model_id": "${env.NOT_SET}"},
        {"model_id": "${env.NOT_SET}", "provider_id": "${env.NOT_SET:+vllm}"},
    ]
    datasets = [
        {"dataset_id": "${env.NOT_SET}", "provider_id": "nvidia", "source": {"uri": "${env.NOT_SET}"}},
        {"dataset_id": "kept", "source": {"rows": [{"a": 1}]}},
    ]
    listed = {"models": models, "datasets": datasets}
    document = {
        "providers": {
            "inference": [{"provider_id": "ollama", "provider_type": "remote::ollama"}],
            "datasetio": [{"provider_id": "nvidia", "provider_type": "remote::nvidia"}],
        },
        **(listed if place == "models" else {place: listed}),
    }
    config = load(tmp_path, document)
    assert (config.models, [d.dataset_id for d in config.datasets]) == ([], ["kept"])
    named = "" if place == "models" else f"{place}."
    for what in (
        f"{named}models.0 is left out, since there is no provider 'ollama'",
        f"{named}models.1 is left out, since its provider is",
        f"{named}datasets.0 is left out, since there is no provider 'nvidia'",
    ):
        assert [what in message for message in warnings].count(True) == 1, warnings


def test_a_model_that_names_a_provider_of_ours_or_none_still_needs_its_variables(tmp_path: Path):
    inference = [{"provider_id": "tf", "provider_type": "inline::transformers"}]
    for model in ({"model_id": "${env.NOT_SET}", "provider_id": "tf"}, {"model_id": "${env.NOT_SET}"}):
        with pytest.raises(EnvironmentUnset, match=r"models\.0\.model_id needs the environment variable NOT_SET"):
            load(tmp_path, {"providers": {"inference": inference}, "models": [model]})


@pytest.mark.parametrize("provider_id", ["meta", None])
async def test_a_model_that_llama_stacks_own_server_held_does_not_stop_the_boot(
    tmp_path: Path, warnings: list[str], provider_id: str | None
):
    config = load(
        tmp_path,
        {
            "providers": {"inference": [{"provider_id": "meta", "provider_type": "inline::meta-reference"}]},
            "models": [{"model_id": "meta-llama/Llama-3.2-3B-Instruct", "provider_id": provider_id}],
        },
        POSTGRAD_HOME=str(tmp_path / "home"),
    )
    stack = await build_stack(config, plan(config))
    stack.database.close()
    stack.lock.close()
    (warning,) = [message for message in warnings if message.startswith("models.0")]
    assert "'meta-llama/Llama-3.2-3B-Instruct'" in warning
    assert "postgrad models import" in warning


async def test_a_model_listed_for_our_own_provider_that_is_not_there_is_an_error(tmp_path: Path):
    config = load(
        tmp_path,
        {
            "providers": {"inference": [{"provider_id": "tf", "provider_type": "inline::transformers"}]},
            "models": [{"model_id": "no/such", "provider_id": "tf"}],
        },
        POSTGRAD_HOME=str(tmp_path / "home"),
    )
    with pytest.raises(RunConfigInvalid, match=r"models\.0: .*no/such"):
        await build_stack(config, plan(config))


def test_a_switched_off_provider_is_not_warned_of(tmp_path: Path, warnings: list[str]):
    entries = [{"provider_id": "${env.NOT_SET:+nv}", "provider_type": "remote::nvidia"}]
    load(tmp_path, {"providers": {"post_training": entries}})
    assert warnings == []


@pytest.mark.parametrize("api", ["post_training", "datasetio", "inference"])
def test_a_type_that_no_llama_stack_had_is_an_error_that_names_it(tmp_path: Path, api: str):
    entries = [{"provider_id": "x", "provider_type": "remote::nobody"}]
    with pytest.raises(ProviderInvalid, match=rf"providers\.{api}\.0: no provider of type 'remote::nobody'"):
        plan(load(tmp_path, {"providers": {api: entries}}))


def test_providers_in_a_folder_and_of_modules_are_kept(tmp_path: Path, warnings: list[str]):
    for place in ("remote/post_training/nvidia.yaml", "inline/datasetio/rows.yaml", "remote/safety/guard.yaml"):
        file = tmp_path / "providers.d" / place
        file.parent.mkdir(parents=True)
        file.write_text("adapter: {}\n")
    document = {
        "external_providers_dir": "${env.FOLDER}",
        "providers": {
            "post_training": [{"provider_id": "kept", "provider_type": "remote::nvidia"}],
            "inference": [{"provider_id": "too", "provider_type": "remote::vllm", "module": "some_package==1.2"}],
        },
    }
    config = load(tmp_path, document, FOLDER=str(tmp_path / "providers.d"))
    assert config.external_providers_dir == tmp_path / "providers.d"
    assert config.providers[Api.post_training][0].enabled
    assert config.providers[Api.inference][0].module == "some_package==1.2"
    assert warnings == []


def test_a_folder_of_providers_that_is_not_there_is_said(tmp_path: Path, warnings: list[str]):
    load(tmp_path, {"external_providers_dir": "~/nowhere"})
    assert [message.partition(": ")[2] for message in warnings] == [
        "external_providers_dir: there is no folder /home/user/nowhere"
    ]


STORAGE: dict[str, Any] = {
    "backends": {
        "kv_default": {"type": "kv_sqlite", "db_path": "~/kv.db"},
        "sql_default": {"type": "sql_postgres", "host": "${env.NOT_SET}", "user": "u"},
        "pg": {
            "type": "kv_postgres",
            "host": "db",
            "port": "${env.PG_PORT:=5433}",
            "user": "u",
            "password": "p@ss",
            "table_name": "llamastack_kvstore",
            "ssl_mode": "verify-full",
            "ca_cert_path": "/etc/ca.pem",
        },
    },
    "stores": {"metadata": {"namespace": "registry", "backend": "kv_default"}},
}


def test_the_store_lies_where_the_metadata_did(tmp_path: Path, warnings: list[str]):
    config = load(tmp_path, {"storage": STORAGE})
    assert config.metadata_store.sqlalchemy_url(config.home) == "sqlite:////home/user/kv.db"
    in_postgres = {**STORAGE, "stores": {"metadata": {"backend": "pg"}}}
    url = make_url(load(tmp_path, {"storage": in_postgres}).metadata_store.sqlalchemy_url(config.home))
    assert (url.host, url.port, url.database, url.username, url.password) == ("db", 5433, "llamastack", "u", "p@ss")
    assert url.query == {"sslmode": "verify-full", "sslrootcert": "/etc/ca.pem"}
    assert warnings == []


def test_without_a_word_about_metadata_it_lies_in_upstreams_default_backend(tmp_path: Path):
    without = {"backends": STORAGE["backends"]}
    assert load(tmp_path, {"storage": without}).metadata_store.db_path == "/home/user/kv.db"
    nothing = load(tmp_path, {"storage": {}}, POSTGRAD_HOME="/srv/pg")
    assert nothing.metadata_store.sqlalchemy_url(nothing.home) == "sqlite:////srv/pg/postgrad.db"


def test_of_two_places_for_the_store_the_newer_section_counts(tmp_path: Path, warnings: list[str]):
    config = load(tmp_path, {"storage": STORAGE, "metadata_store": {"type": "sqlite", "db_path": "/old.db"}})
    assert config.metadata_store.db_path == "/home/user/kv.db"
    assert len(warnings) == 1
    assert "metadata_store is left out, since storage.backends.kv_default" in warnings[0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"storage": "here"}, "storage must be a mapping"),
        ({"storage": {"backends": ["a"]}}, "`stores` and `backends` must each be a mapping"),
        (
            {"storage": {"backends": {"kv_default": {"db_path": "a"}}}},
            r"storage\.backends\.kv_default\.type is missing",
        ),
        ({"storage": {"backends": {"kv_default": {"type": "kv_redis"}}}}, "jobs are not kept in 'kv_redis'"),
        ({"storage": {"backends": {"kv_default": {"type": "kv_sqlite", "path": "a"}}}}, r"kv_default\.path: "),
        ({"storage": {"stores": {"metadata": {"backend": "x"}}}}, "no backend 'x'; there is none"),
        ({"storage": {"stores": {"metadata": {"backend": ["x"]}}}}, "no backend "),
        ({"registered_resources": {"models": [{"model_id": "../up"}]}}, r"registered_resources\.models\.0\.model_id: "),
        ({"registered_resources": []}, "registered_resources must be a mapping"),
        ({"models": [{"model_id": "a"}], "registered_resources": {"models": "b"}}, "models must be a list"),
        ({"server": {"auth": {"provider_config": {"type": "custom"}}}}, "server.auth: .* API keys"),
        ({"server": {"tls_certfile": "cert.pem"}}, "server.tls_certfile: .* proxy"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_its_place(tmp_path: Path, document: Any, message: str):
    with pytest.raises(RunConfigInvalid, match=message):
        load(tmp_path, document)


def test_an_api_that_is_no_name_is_left_out(tmp_path: Path, warnings: list[str]):
    assert load(tmp_path, {"apis": ["inference", {"a": 1}, 7]}).apis == [Api.inference]
    assert len(warnings) == 2


def test_resources_of_both_places_are_registered(tmp_path: Path):
    config = load(tmp_path, {"models": [{"model_id": "a"}], "registered_resources": {"models": [{"model_id": "b"}]}})
    assert [model.model_id for model in config.models] == ["a", "b"]


def test_settings_of_a_server_without_effect_are_said_once_each(tmp_path: Path, warnings: list[str]):
    server = {"port": 8000, "workers": 4, "cors": True, "quota": None, "auth": None, "tls_certfile": None}
    assert load(tmp_path, {"server": server}).server.port == 8000
    assert [message.partition(": ")[2].split()[0] for message in warnings] == ["server.cors", "server.workers"]


def test_a_store_that_llama_stack_has_written_keeps_its_own_table(tmp_path: Path):
    database = tmp_path / "registry.db"
    with sqlite3.connect(database) as theirs:
        theirs.execute("CREATE TABLE kvstore (key TEXT PRIMARY KEY, value TEXT, expiration TIMESTAMP)")
        theirs.execute("INSERT INTO kvstore VALUES ('registry:1', '{}', NULL)")
    theirs.close()
    with served(tmp_path / "home", stack=str(FOLDER / "v0.1.0.yaml"), SQLITE_STORE_DIR=str(tmp_path)) as (url, _):
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
    with sqlite3.connect(database) as both:
        assert both.execute("SELECT key FROM kvstore").fetchall() == [("registry:1",)]
        assert ("catalog_models",) in both.execute("SELECT name FROM sqlite_master").fetchall()
    both.close()
