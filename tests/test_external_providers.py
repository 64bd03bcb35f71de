"""Providers from other packages: by entry point, by folder, by module; and each way in which one cannot be used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from apis.common import Api
from apis.errors import ProviderInvalid
from distributions.resolver import PlannedProvider, plan
from distributions.run_config import load_run_config
from post_training.training.model import LoraSettings, ModelConfig, Segments
from providers.external import folder_files, installed, known
from providers.registry import find_spec
from tests.model_fixture import REPOSITORY
from tests.test_resolver import built

SPEC = """
from pydantic import BaseModel, ConfigDict
from apis.common import Api
from providers.spec import ProviderSpec

class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1

class Source:
    def __init__(self, provider_id, size):
        self.provider_id, self.size = provider_id, size
    def accepts(self, source):
        return False
    def source_policy(self):
        return {"size": self.size}

async def get_provider_impl(config, deps):
    return Source(deps.provider_id, config.size)

def get_provider_spec():
    return ProviderSpec(
        spec_version=1, api=Api.datasetio, provider_type="inline::shelf", module="NAME.provider",
        config_class="NAME.provider.Config", pip_packages=("shelf-extras",),
    )
"""

Package = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Puts a package where Python finds packages, as an installer would; gives its import name."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def add(name: str, code: str = SPEC, *, entry_point: bool = False, version: str = "1.0") -> str:
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
        (site / name / "provider.py").write_text(code.replace("NAME", name))
        facts = site / f"{name}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (facts / "top_level.txt").write_text(f"{name}\n")
        if entry_point:
            line = f"[postgrad.providers]\nshelf = {name}.provider:get_provider_spec\n"
            (facts / "entry_points.txt").write_text(line)
        return name

    return add


def planned(folder: Path, entry: dict[str, Any], **sections: Any) -> list[PlannedProvider]:
    entries = [{"provider_id": "p", **entry}]
    (folder / "run.yaml").write_text(yaml.safe_dump({"version": 2, "providers": {"datasetio": entries}, **sections}))
    return plan(load_run_config(str(folder / "run.yaml"), {"HOME": str(folder)}))


def refusal(folder: Path, entry: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ProviderInvalid) as caught:
        planned(folder, entry, **sections)
    return caught.value.message


def describe(folder: Path, place: str, **content: Any) -> dict[str, str]:
    """Write a file of an `external_providers_dir`; gives the section that names the folder."""
    file = folder / "providers.d" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content))
    return {"external_providers_dir": str(folder / "providers.d")}


# -- ways in ----------------------------------------------------------------------------------------------------------


def test_an_installed_package_offers_its_providers_by_entry_point(package: Package, tmp_path: Path):
    name = package("shelf_one", entry_point=True)
    assert [spec.provider_type for spec in installed().specs] == ["inline::shelf"]
    (provider,) = planned(tmp_path, {"provider_type": "inline::shelf", "config": {"size": 7}})
    assert provider.config.model_dump() == {"size": 7}
    assert provider.spec.module == f"{name}.provider"


async def test_a_module_that_a_run_yaml_names_is_built(package: Package, tmp_path: Path):
    name = package("shelf_two")
    (provider,) = planned(tmp_path, {"provider_type": "inline::shelf", "module": f"{name}==1.0", "config": {"size": 3}})
    config = load_run_config(str(tmp_path / "run.yaml"), {})
    (source,) = await built(config, [], tmp_path)
    assert (source.provider_id, source.source_policy()) == ("p", {"size": 3})
    assert provider.spec.pip_packages == ("shelf-extras",)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "under adapter"])
def test_a_file_in_the_folder_describes_a_provider_of_its_name(package: Package, tmp_path: Path, nested: bool):
    name = package("shelf_three" + ("_nested" if nested else ""))
    facts: dict[str, Any] = {"module": f"{name}.provider", "config_class": f"{name}.provider.Config"}
    content = {"adapter": {"adapter_type": "kept", **facts}, "api_dependencies": []} if nested else facts
    section = describe(tmp_path, "remote/datasetio/kept.yaml", **content, container_image=None)
    (provider,) = planned(tmp_path, {"provider_type": "remote::kept"}, **section)
    assert provider.config.model_dump() == {"size": 1}


def test_a_type_that_only_llama_stack_had_is_served_where_a_package_offers_it(package: Package, tmp_path: Path):
    package("shelf_nvidia", SPEC.replace("inline::shelf", "remote::nvidia"), entry_point=True)
    (provider,) = planned(tmp_path, {"provider_type": "remote::nvidia"})
    assert provider.spec.module == "shelf_nvidia.provider"


def test_a_factory_may_have_llama_stacks_name_for_remote_providers(package: Package, tmp_path: Path):
    code = SPEC.replace("get_provider_impl", "get_adapter_impl").replace("inline::shelf", "remote::shelf")
    name = package("shelf_adapter", code)
    (provider,) = planned(tmp_path, {"provider_type": "remote::shelf", "module": name})
    assert provider.factory.__name__ == "get_adapter_impl"


def test_only_files_of_our_apis_are_read(tmp_path: Path):
    for place in ("remote/safety/guard.yaml", "inline/datasetio/rows.yaml", "other/datasetio/x.yaml"):
        describe(tmp_path, place)
    assert list(folder_files(tmp_path / "providers.d")) == [(Api.datasetio, "inline::rows")]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def get_provider_spec(: pass", "SyntaxError"),
        ("", "get_provider_spec"),
        ("get_provider_spec = 3", "int, not a ProviderSpec"),
        (SPEC.replace("spec_version=1", "spec_version=2"), "written for spec version 2, this Postgrad has 1"),
        ("def get_provider_spec():\n    return {'spec_version': 2, 'colour': 'blue'}", "written for spec version 2"),
        ("def get_provider_spec():\n    return {'spec_version': 1, 'colour': 'blue'}", "colour: Extra inputs"),
    ],
)
def test_a_provider_whose_spec_cannot_be_had_is_refused_by_name(
    package: Package, tmp_path: Path, request: pytest.FixtureRequest, code: str, missing: str
):
    name = package(f"faulty_{abs(hash(request.node.name))}", code, entry_point=True)
    by_entry_point = refusal(tmp_path, {"provider_type": "inline::shelf"})
    assert "providers.datasetio.0: no provider of type 'inline::shelf'" in by_entry_point
    by_module = refusal(tmp_path, {"provider_type": "inline::shelf", "module": name})
    assert "providers.datasetio.0: provider 'inline::shelf' cannot be loaded" in by_module
    for message in (by_entry_point, by_module):
        assert name in message
        assert missing in message


def test_a_faulty_package_that_no_run_yaml_names_keeps_no_stack_down(
    package: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    package("faulty_alone", "import no_such_library", entry_point=True)
    assert planned(tmp_path, {"provider_type": "inline::localfs"})
    assert "provider 'shelf' of faulty_alone 1.0" in caplog.text
    assert not [spec for spec in known().specs if spec.module.startswith("faulty_alone")]


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (("async def get_provider_impl", "async def something_else"), "get_provider_impl"),
        (("class Config(BaseModel)", "class Other(BaseModel)"), "Config"),
        (("class Config(BaseModel)", "import no_such_library\nclass Config(BaseModel)"), "no_such_library"),
        (("class Config(BaseModel):", "Config = 3\nclass Other(BaseModel):"), "is no pydantic model"),
    ],
)
def test_a_provider_whose_code_lacks_a_part_is_refused_by_name(
    package: Package, tmp_path: Path, request: pytest.FixtureRequest, change: tuple[str, str], missing: str
):
    name = package(f"lacking_{abs(hash(request.node.name))}", SPEC.replace(*change))
    facts = {"module": f"{name}.provider", "config_class": f"{name}.provider.Config", "pip_packages": ["shelf-extras"]}
    section = describe(tmp_path, "inline/datasetio/lacking.yaml", **facts)
    message = refusal(tmp_path, {"provider_type": "inline::lacking"}, **section)
    assert "inline::lacking" in message
    assert missing in message


async def test_a_provider_that_misses_methods_is_refused_with_all_of_them(package: Package, tmp_path: Path):
    code = SPEC.replace("def accepts(self, source)", "def accept(self, source)").replace("def source_policy", "def p")
    name = package("shelf_incomplete", code)
    planned(tmp_path, {"provider_type": "inline::shelf", "module": name})
    with pytest.raises(ProviderInvalid) as caught:
        await built(load_run_config(str(tmp_path / "run.yaml"), {}), [], tmp_path)
    told = caught.value.message
    assert "providers.datasetio.0: inline::shelf does not fulfil DatasetIO" in told
    assert "method accepts is missing" in told
    assert "method source_policy is missing" in told


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"module": "m"}, "config_class: Field required"),
        ({"module": "m", "config_class": "c", "spec_version": 9}, "spec version 9"),
        ({"module": "m", "config_class": "c", "api_dependencies": ["safety"]}, "api_dependencies.0"),
        ({"module": "m", "config_class": "c", "colour": "blue"}, "colour: Extra inputs"),
    ],
)
def test_a_file_that_describes_no_provider_is_named_with_its_fault(tmp_path: Path, content: dict[str, Any], fault: str):
    section = describe(tmp_path, "inline/datasetio/odd.yaml", **content)
    message = refusal(tmp_path, {"provider_type": "inline::odd"}, **section)
    assert f"provider 'inline::odd' of {tmp_path}/providers.d/inline/datasetio/odd.yaml" in message
    assert fault in message


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("shelf_pinned==2.0", "version 1.0 is installed; install shelf_pinned==2.0"),
        ("shelf_pinned>=1", "not a package's import name"),
        ("no_such_package==1", "no package no_such_package is installed"),
        ("no_such_package", "No module named 'no_such_package'"),
        ("shelf_pinned", "has no provider 'inline::other' for datasetio; it has inline::shelf (datasetio)"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(package: Package, tmp_path: Path, module: str, fault: str):
    package("shelf_pinned")
    kind = "inline::other" if "==" not in module and ">" not in module else "inline::shelf"
    assert fault in refusal(tmp_path, {"provider_type": kind, "module": module})


def test_two_providers_of_one_name_are_refused_with_both_modules(package: Package, tmp_path: Path):
    package("shelf_a", entry_point=True)
    package("shelf_b", entry_point=True)
    message = refusal(tmp_path, {"provider_type": "inline::shelf"})
    assert "shelf_a.provider and shelf_b.provider" in message
    (chosen,) = planned(tmp_path, {"provider_type": "inline::shelf", "module": "shelf_b"})
    assert chosen.spec.module == "shelf_b.provider"


def test_nobody_takes_a_built_in_name_unseen(package: Package, tmp_path: Path):
    package("shelf_thief", SPEC.replace("inline::shelf", "inline::localfs"), entry_point=True)
    assert "several providers of datasetio" in refusal(tmp_path, {"provider_type": "inline::localfs"})


def test_a_provider_that_brings_torch_into_the_server_is_refused(package: Package, tmp_path: Path):
    name = package("shelf_heavy", "import torch\n" + SPEC)
    sections = {"providers": {"datasetio": [{"provider_id": "p", "provider_type": "inline::shelf", "module": name}]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"version": 2, **sections}))
    # In a process of its own: this one has torch already.
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from distributions.resolver import plan\n"
        "from distributions.run_config import load_run_config\n"
        "plan(load_run_config(sys.argv[2], {}))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "site"), str(tmp_path / "run.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert "importing shelf_heavy.provider imports torch" in run.stderr


# -- the example ------------------------------------------------------------------------------------------------------

EXAMPLE = REPOSITORY / "examples" / "external_provider"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def test_the_example_is_a_package_of_under_150_lines_that_postgrad_does_not_know():
    files = [file for file in EXAMPLE.rglob("*") if file.suffix in (".py", ".toml", ".md")]
    assert {file.name for file in files} >= {"pyproject.toml", "provider.py", "model.py"}
    assert sum(len(file.read_text().splitlines()) for file in files) < 150
    with pytest.raises(ProviderInvalid, match="no provider of type 'inline::plain'"):
        find_spec(Api.post_training, "inline::plain")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_the_example_computes_what_plain_transformers_and_peft_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str
):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert model_type in importlib.import_module("postgrad_plain.provider").MODEL_TYPES
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    lora = LoraSettings(rank=4, alpha=8, rslora=True)
    model = importlib.import_module("postgrad_plain.model").load_model(
        ModelConfig(tmp_path / "base", lora, dtype="fp32")
    )
    for parameter in model.adapter_parameters().values():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens, lengths = torch.randint(64, (17,)), (9, 8)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        found = model.output(model.hidden_states(Segments(tokens, positions, lengths)))
    tensors, settings = model.peft_adapter(dict(model.adapter_parameters()))
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = [base(input_ids=part[None]).logits[0] for part in tokens.split(lengths)]
    peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    wanted = torch.cat([peft(input_ids=part[None]).logits[0] for part in tokens.split(lengths)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, torch.cat(plain), atol=1e-2)


def test_what_the_guide_shows_of_the_example_is_the_example():
    guide = (REPOSITORY / "docs" / "writing-a-provider.md").read_text()
    blocks = [part.partition("\n")[2] for part in guide.split("```python")[1:]]
    shown = [block.partition("```")[0].strip() for block in blocks]
    code = "\n".join((EXAMPLE / "postgrad_plain" / name).read_text() for name in ("provider.py", "model.py"))
    assert len(shown) >= 3
    for block in shown:
        assert block in code, block
