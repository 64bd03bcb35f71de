"""DoRA, rsLoRA, dropout and a 4-bit base: each trains as PEFT would, leaves as PEFT reads it, resumes and verifies."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from apis.errors import InvalidField, UnsupportedModel
from apis.post_training.models import LoraFinetuningConfig
from post_training.checkpoints import export, verification, verify
from post_training.checkpoints.layout import CheckpointWriter, Manifest
from post_training.checkpoints.state import restore_rng, rng_tensors, save_training_state
from post_training.data.batching import flatten
from post_training.training.model import LoraSettings, ModelConfig, Segments
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from post_training.worker.setup import lora_settings
from providers.torchtune import shim
from providers.torchtune.adapter_config import settings_of_adapter
from providers.torchtune.adapters import DoRALinear
from providers.torchtune.families import describe
from providers.torchtune.model import TorchtuneModel, load_model
from tests.test_trainer import make_rows
from tests.torchtune_models import MODELS, UNTIED, make_model, random_tokens, relative_error

# PEFT 0.21 asks transformers 5.24 under the older of two names; it is not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore:`?.is_gradient_checkpointing:FutureWarning")

LENGTHS = (17, 1, 40, 9)
DORA = LoraSettings(rank=4, alpha=6, dora=True)
RSLORA = LoraSettings(rank=4, alpha=6, rslora=True)
BOTH = LoraSettings(rank=3, alpha=5, dora=True, rslora=True, dropout=0.1)
KINDS = pytest.mark.parametrize("lora", [DORA, RSLORA, BOTH], ids=["dora", "rslora", "both"])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {case: tmp_path_factory.mktemp(case) for case in MODELS}
    for case, path in made.items():
        make_model(path, case)
    return made


def load(base: Path, lora: LoraSettings, **options: Any) -> TorchtuneModel:
    return load_model(ModelConfig(base, lora, **{"dtype": "fp32", **options}))


def flat(lengths: tuple[int, ...] = LENGTHS) -> Segments:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Segments(random_tokens(sum(lengths)), positions, lengths)


def logits_of(model: TorchtuneModel) -> Tensor:
    model.module.eval()
    with torch.no_grad():
        return model.output(model.hidden_states(flat()))


def move(model: TorchtuneModel) -> dict[str, Tensor]:
    """Change every adapter parameter as training might; magnitudes stay near the lengths they start as."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.adapter_parameters().items():
        noise = torch.randn(parameter.shape, generator=generator)
        start = parameter.detach() * (1 + 0.2 * noise) if name.endswith("magnitude") else noise * 0.3
        parameter.data.copy_(start)
    return {name: parameter.detach() for name, parameter in model.adapter_parameters().items()}


def save_adapter(model: TorchtuneModel, path: Path, base: Path) -> Path:
    tensors, config = model.peft_adapter({name: p.detach() for name, p in model.adapter_parameters().items()})
    path.mkdir(parents=True, exist_ok=True)
    export.write_adapter(path, tensors, config, "base", base)
    return path


def plain(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_logits(model: Any) -> Tensor:
    """Each segment by itself in transformers or PEFT, [T, V]."""
    with torch.no_grad():
        return torch.cat([model(input_ids=piece[None]).logits[0] for piece in flat().tokens.split(LENGTHS)])


def peft_logits(base: Path, adapter: Path) -> Tensor:
    return reference_logits(peft.PeftModel.from_pretrained(plain(base), str(adapter)))


# -- what leaves ------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("case", MODELS)
def test_every_family_s_adapter_gives_the_same_logits_in_plain_peft_and_merged(
    bases: dict[str, Path], tmp_path: Path, case: str, lora: LoraSettings
) -> None:
    model = load(bases[case], lora)
    move(model)
    adapter = save_adapter(model, tmp_path / "adapter", bases[case])
    ours = logits_of(model)
    assert relative_error(ours, peft_logits(bases[case], adapter)) < 1e-5
    assert relative_error(ours, reference_logits(plain(bases[case]))) > 0.02
    export.merge(bases[case], adapter, tmp_path / "merged")
    assert relative_error(ours, reference_logits(plain(tmp_path / "merged"))) < 1e-5


@pytest.mark.parametrize("case", UNTIED)
def test_dora_on_the_output_layer_exports_exactly(bases: dict[str, Path], tmp_path: Path, case: str) -> None:
    model = load(bases[case], replace(BOTH, attn_modules=("output_proj",), mlp=False, output=True))
    assert "output.magnitude" in model.adapter_parameters()
    move(model)
    adapter = save_adapter(model, tmp_path / "adapter", bases[case])
    assert relative_error(logits_of(model), peft_logits(bases[case], adapter)) < 1e-5
    export.merge(bases[case], adapter, tmp_path / "merged")
    assert relative_error(logits_of(model), reference_logits(plain(tmp_path / "merged"))) < 1e-5


@KINDS
@pytest.mark.parametrize("case", ["llama", "gemma", "qwen2_tied", "phi3"])
def test_an_adapter_goes_on_bit_for_bit(bases: dict[str, Path], tmp_path: Path, case: str, lora: LoraSettings) -> None:
    model = load(bases[case], lora)
    saved = move(model)
    adapter = save_adapter(model, tmp_path, bases[case])
    loaded = load(bases[case], lora, adapter_dir=adapter).adapter_parameters()
    assert list(loaded) == list(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    settings = lora_settings(settings_of_adapter(adapter, describe(bases[case])))
    assert replace(settings, attn_modules=tuple(sorted(settings.attn_modules))) == replace(
        lora, attn_modules=tuple(sorted(lora.attn_modules))
    )


@pytest.mark.parametrize("field", ["use_dora", "use_rslora"])
@pytest.mark.parametrize("stored", [True, False])
def test_an_adapter_goes_on_as_its_own_kind_only(
    bases: dict[str, Path], tmp_path: Path, field: str, stored: bool
) -> None:
    own, other = LoraSettings(rank=4), LoraSettings(rank=4, **{field.removeprefix("use_"): True})  # pyright: ignore[reportArgumentType]
    if stored:
        own, other = other, own
    adapter = save_adapter(load(bases["llama"], own), tmp_path, bases["llama"])
    with pytest.raises(InvalidField, match=f"whose {field} is {stored}") as refusal:
        load(bases["llama"], other, adapter_dir=adapter)
    assert refusal.value.param == f"algorithm_config.{field}"


@KINDS
def test_peft_reads_the_whole_adapter_config(bases: dict[str, Path], tmp_path: Path, lora: LoraSettings) -> None:
    adapter = save_adapter(load(bases["llama"], lora), tmp_path, bases["llama"])
    read = peft.LoraConfig.from_pretrained(str(adapter))
    assert isinstance(read, peft.LoraConfig)
    assert (read.use_dora, read.use_rslora, read.lora_dropout) == (lora.dora, lora.rslora, lora.dropout)
    assert not set(json.loads((adapter / "adapter_config.json").read_text())) - set(read.to_dict())


def test_an_adapter_that_peft_made_with_dora_goes_on_here(bases: dict[str, Path], tmp_path: Path) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(plain(bases["llama"]), config).eval()
    theirs.save_pretrained(str(tmp_path))
    ours = load(bases["llama"], DORA, adapter_dir=tmp_path)
    assert relative_error(logits_of(ours), reference_logits(theirs)) < 1e-5


def test_a_merge_refuses_row_lengths_that_are_missing_or_not_asked_for(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(load(bases["llama"], DORA), tmp_path / "adapter", bases["llama"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": False}))
    with pytest.raises(Exception, match="only its A and B and magnitude_vector factor"):
        export.merge(bases["llama"], adapter, tmp_path / "merged")


# -- one layer against PEFT's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_dora_layer_trains_as_peft_s(dropout: float, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 16, bias=bias)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_dora=True, lora_dropout=dropout, target_modules=["0"], init_lora_weights=False
    )
    theirs: Any = peft.get_peft_model(nn.Sequential(linear), config).base_model.model[0]  # pyright: ignore[reportIndexIssue, reportArgumentType]
    ours = DoRALinear(24, 16, 4, 6, dropout=dropout, use_bias=bias)
    pairs: dict[str, tuple[Any, Any]] = {
        "a": (ours.lora_a.weight, theirs.lora_A["default"].weight),
        "b": (ours.lora_b.weight, theirs.lora_B["default"].weight),
        "magnitude": (ours.magnitude, theirs.lora_magnitude_vector["default"].weight),
    }
    with torch.no_grad():
        ours.weight.copy_(linear.weight)
        if bias:
            assert ours.bias is not None
            ours.bias.copy_(linear.bias)
        for mine, other in pairs.values():
            mine.copy_(other)
        ours.magnitude.mul_(1.1)
        theirs.lora_magnitude_vector["default"].weight.mul_(1.1)
    ours.remember_rows()
    inputs = torch.randn(5, 24)
    results = []
    for layer in (ours, theirs):
        x = inputs.clone().requires_grad_()
        torch.manual_seed(1)  # the same masks
        y = layer(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    assert results[0][1] is not None
    assert results[1][1] is not None
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)
    for name, (mine, other) in pairs.items():
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.allclose(mine.grad, other.grad, rtol=1e-4, atol=1e-5), name


def test_row_lengths_are_those_of_the_whole_updated_matrix() -> None:
    torch.manual_seed(0)
    layer = DoRALinear(24, 16, 4, 6, dropout=0.0, use_bias=False)
    nn.init.normal_(layer.lora_b.weight)
    layer.remember_rows()
    whole = layer.weight + 1.5 * layer.lora_b.weight @ layer.lora_a.weight
    assert torch.allclose(layer.row_lengths(), torch.linalg.norm(whole, dim=1), rtol=1e-6)


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_fresh_dora_adapter_changes_nothing_at_all(bases: dict[str, Path]) -> None:
    for dtype in ("fp32", "bf16"):
        dora, lora = (load(bases["qwen2"], replace(DORA, dora=dora), dtype=dtype) for dora in (True, False))
        assert torch.equal(logits_of(dora), logits_of(lora)), dtype


def test_a_weight_row_of_zeros_has_no_direction_and_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][7] = 0
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"row 7 of output\.weight is zero"):
        load(tmp_path, replace(DORA, output=True))
    load(tmp_path, DORA)


def trainer_of(base: Path, lora: LoraSettings, **options: Any) -> Trainer:
    torch.manual_seed(11)
    return Trainer(load(base, lora, **options), OptimSettings(8, lr=1e-2))


@pytest.mark.parametrize("lora", [DORA, RSLORA, BOTH, LoraSettings(4, 8, quantized_base=True)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_lowers_the_loss_and_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(
    bases: dict[str, Path], lora: LoraSettings, dtype: str
) -> None:
    batch = [flatten(make_rows(4)), flatten(make_rows(3, seed=1))]
    straight = trainer_of(bases["llama"], lora, dtype=dtype)
    losses = [straight.train_step(batch).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1

    first = trainer_of(bases["llama"], lora, dtype=dtype)
    for _ in range(3):
        first.train_step(batch)
    state, rng = first.state(), rng_tensors()
    resumed = trainer_of(bases["llama"], lora, dtype=dtype)
    resumed.load_state(*state)
    restore_rng(rng)
    assert [resumed.train_step(batch).loss for _ in range(5)] == losses[3:]
    for name, tensor in straight.state()[0].items():
        assert torch.equal(tensor, resumed.state()[0][name]), name


def test_magnitudes_are_trained_in_fp32_whatever_the_network_computes_in(bases: dict[str, Path]) -> None:
    trainer = trainer_of(bases["llama"], DORA, dtype="bf16")
    before = trainer.masters.snapshot()
    trainer.train_step([flatten(make_rows(3))])
    after = trainer.masters.snapshot()
    magnitudes = {n: p for n, p in trainer.model.adapter_parameters().items() if n.endswith("magnitude")}
    assert len(magnitudes) == 14
    for name, parameter in magnitudes.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, after[name])
        assert not torch.equal(before[name], after[name])


def test_rslora_is_lora_with_alpha_times_the_root_of_the_rank(bases: dict[str, Path]) -> None:
    ours = trainer_of(bases["llama"], LoraSettings(4, 6, rslora=True))
    same = trainer_of(bases["llama"], LoraSettings(4, 12))
    batch = [flatten(make_rows(3))]
    assert [ours.train_step(batch).loss for _ in range(3)] == [same.train_step(batch).loss for _ in range(3)]


def test_dropout_is_drawn_from_the_seed_and_left_out_of_validation(bases: dict[str, Path]) -> None:
    dropped = LoraSettings(4, 8, dropout=0.5)
    batch = [flatten(make_rows(3))]
    runs = {}
    for kind, lora, seed in (("a", dropped, 1), ("b", dropped, 1), ("c", dropped, 2), ("none", LoraSettings(4, 8), 1)):
        trainer = trainer_of(bases["llama"], lora)
        torch.manual_seed(seed)
        losses = [trainer.train_step(batch).loss for _ in range(3)]
        state = torch.get_rng_state()
        validated = [trainer.validate(batch).loss for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
        assert validated[0] == validated[1]
        runs[kind] = losses
    assert runs["a"] == runs["b"]
    # B is zero, so nothing shows before the first update. (Without dropout, products are of other sizes.)
    assert runs["a"][0] == runs["c"][0] == pytest.approx(runs["none"][0], rel=1e-6)
    assert len({runs[kind][-1] for kind in ("a", "c", "none")}) == 3


@pytest.mark.parametrize("lora", [LoraSettings(4, 8, dropout=0.5), replace(DORA, dropout=0.5)])
def test_recomputed_layers_drop_what_they_dropped_before(bases: dict[str, Path], lora: LoraSettings) -> None:
    batch = [flatten(make_rows(3))]
    results = []
    for checkpointing in (False, True):
        trainer = trainer_of(bases["llama"], lora, activation_checkpointing=checkpointing)
        move(trainer.model)  # pyright: ignore[reportArgumentType]
        losses = [trainer.train_step(batch).loss for _ in range(2)]
        results.append((losses, trainer.masters.snapshot()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], tensor) for name, tensor in results[1][1].items())


# -- a base in four bits ----------------------------------------------------------------------------------------------


def test_a_quantized_base_is_a_quarter_of_bf16_and_near_the_whole_one(bases: dict[str, Path]) -> None:
    lora = LoraSettings(4, 8, attn_modules=("q_proj",), mlp=False)
    # Joined products would hold the whole weights elsewhere.
    whole = load(bases["llama"], lora, dtype="bf16", kernels="plain")
    quantized = load(bases["llama"], replace(lora, quantized_base=True), dtype="bf16")
    for name, weight in whole.module.named_parameters():
        other = quantized.module.get_parameter(name)
        is_base = name.startswith("layers.") and weight.dim() == 2 and "lora" not in name
        assert (type(other.data).__name__ == "NF4Tensor") == is_base, name
        if is_base:
            stored: Any = other.data
            assert 2 * stored.quantized_data.numel() == weight.numel()  # two to a byte
            error = relative_error(other.to(torch.float32), weight.detach().float())
            assert 0.05 < error < 0.12, name  # 4-bit NormalFloat of normal weights in blocks of 64
    assert relative_error(logits_of(quantized).float(), logits_of(whole).float()) < 0.5


def test_nf4_values_are_the_sixteen_of_the_paper_times_a_block_s_largest(bases: dict[str, Path]) -> None:
    model = load(bases["llama"], LoraSettings(4, 8, quantized_base=True))
    weight: Any = model.module.get_parameter("layers.0.mlp.w1.weight")
    blocks = weight.to(torch.float32).reshape(-1, 64)
    # Dettmers et al. 2023, appendix E.
    below = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911]
    table = torch.tensor([*below, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0])
    relative = blocks / blocks.abs().amax(1, keepdim=True)
    # Either end of a block may be the largest.
    nearest = (relative[..., None] - table).abs().amin(-1)
    assert float(nearest.max()) < 2e-4


def test_a_quantized_base_trains_adapters_only_and_against_its_own_values(bases: dict[str, Path]) -> None:
    model = load(bases["qwen2"], LoraSettings(4, 8, quantized_base=True))
    move(model)
    reference = load(bases["qwen2"], LoraSettings(4, 8))
    move(reference)
    for name, parameter in reference.module.named_parameters():
        stored: Any = model.module.get_parameter(name)
        parameter.data.copy_(stored.to(torch.float32).detach())
    assert relative_error(logits_of(model), logits_of(reference)) < 1e-6
    for each in (model, reference):
        each.output(each.hidden_states(flat())).square().mean().backward()
    expected = reference.adapter_parameters()
    for name, parameter in model.adapter_parameters().items():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, expected[name].grad) < 1e-5, name  # pyright: ignore[reportArgumentType]
    assert {n for n, p in model.module.named_parameters() if p.grad is not None} == set(expected)


# -- verified ---------------------------------------------------------------------------------------------------------


def checkpoint(home: Path, base: Path, lora: LoraSettings, merged: bool = True) -> Path:
    model = load(base, lora)
    masters = move(model)
    tensors, config = model.peft_adapter(masters)
    with CheckpointWriter(home, "job", 5) as writer:
        export.write_adapter(writer.adapter, tensors, config, "base", base)
        if merged:
            export.merge(base, writer.adapter, writer.merged)
        save_training_state(writer.training_state, {f"master.{name}": masters[name] for name in masters}, {"step": 5})
        return writer.commit(
            Manifest(
                identifier="base-sft-job-0",
                job_uuid="job",
                model="base",
                base_model="base",
                epoch=0,
                step=5,
                created_at=datetime.now(UTC),
            )
        )


def verified(directory: Path, base: Path, lora: LoraSettings) -> verification.VerifyReport:
    request = {"checkpoint_dir": str(directory), "base_dir": str(base), "model_module": "providers.torchtune.model"}
    return verify.verify(request | {"lora": asdict(lora)})


@pytest.mark.parametrize("lora", [DORA, RSLORA, BOTH])
@pytest.mark.parametrize("case", ["llama_tied", "phi3"])
def test_a_checkpoint_of_each_kind_is_verified(
    bases: dict[str, Path], tmp_path: Path, case: str, lora: LoraSettings
) -> None:
    report = verified(checkpoint(tmp_path, bases[case], lora), bases[case], lora)
    assert report.adapter_error is not None
    assert max(report.adapter_error, report.merged_error) < 1e-5
    assert report.quantization_change is None


def test_an_adapter_of_a_quantized_base_is_verified_and_merged_on_the_stored_one_and_the_drift_is_told(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base, lora = bases["llama"], LoraSettings(4, 8, quantized_base=True)
    directory = checkpoint(tmp_path, base, lora)
    report = verified(directory, base, lora)
    assert report.adapter_error is not None
    assert max(report.adapter_error, report.merged_error) < 1e-5
    quantized, stored = load(base, lora), load(base, replace(lora, quantized_base=False))
    for model in (quantized, stored):
        move(model)
    # The same quantity on other tokens.
    drift = relative_error(logits_of(quantized), logits_of(stored))
    assert report.quantization_change == pytest.approx(drift, rel=0.25)
    assert json.loads((directory / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_torchtune_s_own_dora_is_not_used_since_it_scales_the_bias() -> None:
    from torchtune.modules.peft import DoRALinear as Theirs

    torch.manual_seed(0)
    layer = Theirs(24, 16, 4, 6, use_bias=True)
    ours = DoRALinear(24, 16, 4, 6, dropout=0.0, use_bias=True)
    ours.load_state_dict(layer.state_dict())
    ours.remember_rows()
    with torch.no_grad():
        layer.initialize_dora_magnitude()
        layer.magnitude.mul_(2)
        ours.magnitude.copy_(layer.magnitude)
        x = torch.randn(3, 24)
        assert not torch.allclose(layer(x), ours(x), atol=1e-3)
        for each in (layer, ours):
            each.get_parameter("bias").zero_()
        assert torch.allclose(layer(x), ours(x), rtol=1e-5, atol=1e-6)
    assert isinstance(ours, shim.LoRALinear)


def test_the_request_s_fields_are_the_settings() -> None:
    request = LoraFinetuningConfig(
        rank=8,
        alpha=4,
        use_dora=True,
        use_rslora=True,
        lora_dropout=0.25,
        quantize_base=True,
        apply_lora_to_output=True,
    )
    assert lora_settings(request) == LoraSettings(
        rank=8, alpha=4, output=True, dora=True, rslora=True, dropout=0.25, quantized_base=True
    )
