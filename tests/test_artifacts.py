"""What leaves a training run, loaded as its users load it: nothing is applied twice, lost, or said that is not so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from post_training.checkpoints.export import merge, write_adapter
from post_training.checkpoints.verify import probe_segments
from post_training.data.chat import ChatTokenizer
from post_training.training.model import LoraSettings, ModelConfig, Segments
from post_training.worker import announcing
from providers.torchtune.model import load_model
from tests.job_bench import Bench, VerifierHere, rows
from tests.tiny_llama import CHATML, save_tiny_llama
from tests.torchtune_models import make_model, random_tokens, relative_error

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# -- of a whole job --------------------------------------------------------------------------------------------------


@dataclass
class Artifacts:
    """The last checkpoint of a job, and the base that it was trained on."""

    base: Path
    folder: Path
    verification: dict[str, Any]

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def merged(self) -> Path:
        return self.folder / "merged"


@pytest.fixture(scope="module", autouse=True)
def _verification_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield


@pytest.fixture(scope="module", params=["jinja", "config"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """A job's artifacts; its base has the chat template in a file of its own, or in tokenizer_config.json."""
    root = tmp_path_factory.mktemp("job")
    base = save_tiny_llama(root / "tiny", context=128, chat_template=CHATML if request.param == "config" else None)
    if request.param == "jinja":
        (base / "chat_template.jinja").write_text(CHATML)
    bench = Bench(root / "home", base, export=("adapter", "merged"))
    spec = bench.submit("made", rows(4), n_epochs=1, optimizer_config={"lr": 0.01})
    spec_outcome = bench.run(spec)
    assert spec_outcome.status == "completed", spec_outcome.error
    (row,) = bench.store.checkpoints("made")
    assert row.verification is not None
    return Artifacts(base, bench.home / row.path, row.verification)


def test_the_adapters_configuration_is_complete_and_pefts_own(trained: Artifacts):
    content = json.loads((trained.adapter / "adapter_config.json").read_text())
    assert content.keys() <= {field.name for field in dataclasses.fields(LoraConfig)}
    assert (
        LoraConfig(**content).to_dict().items() >= {**content, "target_modules": set(content["target_modules"])}.items()
    )
    loaded = PeftConfig.from_pretrained(str(trained.adapter))
    assert isinstance(loaded, LoraConfig)
    assert loaded.task_type == TaskType.CAUSAL_LM
    assert loaded.base_model_name_or_path == "tiny"
    assert (loaded.r, loaded.lora_alpha, loaded.bias, loaded.inference_mode) == (4, 8, "none", True)
    targets = {key.split(".")[-3] for key in load_file(trained.adapter / "adapter_model.safetensors")}
    assert loaded.target_modules == targets


def test_adapter_and_merged_model_share_no_folder_and_neither_is_both(trained: Artifacts):
    # transformers takes a config.json beside an adapter_config.json for "this model with that adapter".
    together = {path.parent for path in trained.folder.rglob("config.json")} & {
        path.parent for path in trained.folder.rglob("adapter_config.json")
    }
    assert together == set()
    assert not list(trained.merged.glob("adapter*"))
    assert not list(trained.adapter.glob("model*"))


def test_the_merged_folder_holds_the_adapter_once_however_it_is_loaded(trained: Artifacts):
    tokens = torch.arange(3, 40)
    base = plain(trained.base)
    untrained = logits(base, tokens)
    once = logits(PeftModel.from_pretrained(base, str(trained.adapter)), tokens)
    merged = plain(trained.merged)
    assert not getattr(merged, "_hf_peft_config_loaded", False)
    assert relative_error(logits(merged, tokens), once) < 1e-5
    twice = logits(PeftModel.from_pretrained(merged, str(trained.adapter)), tokens)
    assert relative_error(untrained, once) > 1e-3
    assert relative_error(twice, once) > 1e-3  # so the test above would have seen it


@pytest.mark.parametrize("part", ["", "adapter"])
def test_no_other_folder_passes_for_a_whole_model(trained: Artifacts, part: str):
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(trained.folder / part)


def test_only_safetensors_json_and_text_leave_a_job(trained: Artifacts):
    suffixes = {path.suffix for path in trained.folder.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".md"}


def test_the_chat_template_travels_and_renders_what_was_trained_on(trained: Artifacts):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say  red\n"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "Füße?"},
    ]
    expected = ChatTokenizer.from_dir(trained.base).encode_prompt(messages)
    for folder in (trained.adapter, trained.merged):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert found["input_ids"] == list(expected)
        assert ChatTokenizer.from_dir(folder).encode_prompt(messages) == expected
        assert tokenizer.eos_token == "<|im_end|>"


def test_what_was_measured_is_stored_with_the_checkpoint(trained: Artifacts):
    probe = probe_segments(trained.base)
    model = plain(trained.base)
    untrained = torch.cat([logits(model, tokens) for tokens in probe])
    model = PeftModel.from_pretrained(model, str(trained.adapter))
    change = relative_error(torch.cat([logits(model, tokens) for tokens in probe]), untrained)
    assert trained.verification["change"] == pytest.approx(change, rel=1e-3)
    assert trained.verification["merged_dtype"] == "fp32"
    assert trained.verification["adapter_error"] < 1e-5
    assert trained.verification["merged_error"] < 1e-5
    assert trained.verification["merge"]["relative_loss"] == 0


# -- of each kind of model and adapter -------------------------------------------------------------------------------


@dataclass
class Exported:
    """An adapter of random factors, written and merged; what the trainer's model computes with it; the merge's loss."""

    adapter: Path
    merged: Path
    tokens: Tensor
    expected: Tensor
    loss: float


def exported(root: Path, base: Path, lora: LoraSettings, dtype: Any = "fp32") -> Exported:
    model = load_model(ModelConfig(base, lora, dtype="fp32"))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.adapter_parameters().values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    tokens = random_tokens(30)
    with torch.no_grad():
        expected = model.output(model.hidden_states(Segments(tokens, torch.arange(30), (30,))))
    (root / "adapter").mkdir(parents=True)
    parameters = {name: parameter.detach() for name, parameter in model.adapter_parameters().items()}
    write_adapter(root / "adapter", *model.peft_adapter(parameters), "base", base)
    report = merge(base, root / "adapter", root / "merged", dtype)
    return Exported(root / "adapter", root / "merged", tokens, expected, report.relative_loss)


def assert_both_forms_compute_it(base: Path, found: Exported) -> None:
    model = plain(base)
    assert relative_error(logits(model, found.tokens), found.expected) > 1e-2
    assert (
        relative_error(logits(PeftModel.from_pretrained(model, str(found.adapter)), found.tokens), found.expected)
        < 1e-5
    )
    assert relative_error(logits(plain(found.merged), found.tokens), found.expected) < 1e-5


def test_an_adapter_on_the_output_layer_is_in_the_merged_models_own_output(tmp_path: Path):
    make_model(tmp_path / "base", "llama")
    found = exported(tmp_path / "out", tmp_path / "base", LoraSettings(rank=4, alpha=8, mlp=False, output=True))
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(found.merged / "model.safetensors")
    assert relative_error(after["lm_head.weight"], before["lm_head.weight"]) > 1e-2
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not json.loads((found.merged / "config.json").read_text())["tie_word_embeddings"]
    assert_both_forms_compute_it(tmp_path / "base", found)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ("llama_tied", {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("gemma", {"head_dim": 6}),
    ],
    ids=["12", "10", "6, not hidden size / heads"],
)
def test_odd_head_sizes_export_exactly(tmp_path: Path, case: str, config: dict[str, int]):
    make_model(tmp_path / "base", case, **config)
    assert_both_forms_compute_it(tmp_path / "base", exported(tmp_path / "out", tmp_path / "base", LoraSettings(5, 7)))


@pytest.mark.parametrize(
    ("case", "tied"), [("llama", False), ("llama_tied", True), ("qwen2_tied", True), ("gemma", True)]
)
@pytest.mark.parametrize("said", [True, False], ids=["said", "by default"])
def test_the_tied_flag_says_what_is_stored(tmp_path: Path, case: str, tied: bool, said: bool):
    base = tmp_path / "base"
    make_model(base, case)
    config = json.loads((base / "config.json").read_text())
    if not said and config["tie_word_embeddings"] == (case == "gemma"):
        # Where it is the architecture's default, files of the hub leave it out.
        del config["tie_word_embeddings"]
        (base / "config.json").write_text(json.dumps(config))
    found = exported(tmp_path / "out", base, LoraSettings(rank=4, alpha=8))
    stored = load_file(found.merged / "model.safetensors").keys()
    assert json.loads((found.merged / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in stored) is not tied
    model = plain(found.merged)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert_both_forms_compute_it(base, found)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 4), (4, 16), (7, 3)])
def test_the_recorded_scaling_is_the_one_in_the_merged_weights(tmp_path: Path, rank: int, alpha: int):
    base = tmp_path / "base"
    make_model(base, "llama")
    found = exported(tmp_path / "out", base, LoraSettings(rank, alpha, attn_modules=("v_proj",), mlp=False))
    config = json.loads((found.adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, alpha, False)
    name = "model.layers.1.self_attn.v_proj"
    factors = load_file(found.adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    before, after = (load_file(folder / "model.safetensors")[f"{name}.weight"] for folder in (base, found.merged))
    torch.testing.assert_close(after - before, alpha / rank * b @ a, rtol=1e-4, atol=1e-6)


def test_a_merge_saved_in_bf16_loses_what_it_reports(tmp_path: Path):
    base = tmp_path / "base"
    make_model(base, "llama")
    exact = exported(tmp_path / "fp32", base, LoraSettings(rank=4, alpha=8))
    rounded = exported(tmp_path / "bf16", base, LoraSettings(rank=4, alpha=8), "bf16")
    before, whole, saved = (load_file(path / "model.safetensors") for path in (base, exact.merged, rounded.merged))
    changed = [name for name in before if name.endswith("_proj.weight")]
    delta = torch.cat([(whole[name] - before[name]).flatten() for name in changed])
    lost = torch.cat([(saved[name].float() - whole[name]).flatten() for name in changed])
    assert exact.loss == 0
    assert rounded.loss == pytest.approx(float(lost.norm() / delta.norm()), rel=1e-2)
    assert 1e-4 < rounded.loss < 1e-1
