"""The fast path against torchtune's own modules: the same losses, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor_config

from post_training.data.batching import flatten
from post_training.data.types import FlatBatch, TokenizedRow
from post_training.training.kernels import can_compile
from post_training.training.loss import LossSums, can_compile_loss, loss_and_gradient
from post_training.training.model import KernelForm, LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from providers.torchtune.fused import FusedLayer
from providers.torchtune.fused_attention import Padding
from providers.torchtune.model import TorchtuneModel, load_model
from tests.torchtune_models import MODELS, UNTIED, make_model, random_tokens, relative_error

BOUND = 1e-5
LENGTHS = (17, 1, 300, 9)
OPTIONS: dict[str, LoraSettings] = {
    "all layers": LoraSettings(4, 8),
    "queries and values only": LoraSettings(4, 8, attn_modules=("q_proj", "v_proj"), mlp=False),
    "MLP only": LoraSettings(4, 8, attn_modules=()),
    "odd rank and scaling": LoraSettings(3, 7, rslora=True),
    "dropout": LoraSettings(4, 8, dropout=0.3),
    "DoRA": LoraSettings(4, 8, dora=True),
    "quantized base": LoraSettings(4, 8, quantized_base=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for case in MODELS:
        made[case] = tmp_path_factory.mktemp(case)
        make_model(made[case], case, max_position_embeddings=512)
    return made


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> FlatBatch:
    """Random rows; about a third of the tokens unsupervised, the others of unequal weight."""
    generator = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        weights = generator.choice([0, 0.5, 1], length).astype(np.float32)
        weights[0] = 0
        tokens = random_tokens(length, seed + number).numpy().astype(np.int32)
        rows.append(TokenizedRow(number, tokens, weights))
    return flatten(rows)


def loaded(base: Path, kernels: KernelForm, lora: LoraSettings, **settings: Any) -> TorchtuneModel:
    model = load_model(ModelConfig(base, lora, kernels=kernels, **{"dtype": "fp32", **settings}))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.adapter_parameters().values():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        with torch.no_grad():
            parameter.add_(noise)  # B is zero at first, and A would get no gradient
    model.module.train()
    return model


def loss_and_gradients(model: TorchtuneModel, rows: FlatBatch) -> tuple[LossSums, dict[str, torch.Tensor]]:
    torch.manual_seed(5)  # dropout
    trainer = Trainer(model, OptimSettings(1))
    hidden, targets, weights = trainer._supervised(rows)
    compiled = can_compile_loss(model)
    sums = loss_and_gradient(model, hidden, targets, weights, rows.weight_sum, compiled=compiled)
    gradients = {name: parameter.grad for name, parameter in model.adapter_parameters().items()}
    return sums, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def assert_same(base: Path, lora: LoraSettings, kernels: KernelForm = "fused", **settings: Any) -> None:
    rows = batch()
    expected_sums, expected = loss_and_gradients(loaded(base, "plain", lora), rows)
    sums, gradients = loss_and_gradients(loaded(base, kernels, lora, **settings), rows)
    assert sums.loss == pytest.approx(expected_sums.loss, rel=BOUND)
    assert (sums.weight, sums.tokens) == (expected_sums.weight, expected_sums.tokens)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert relative_error(gradients[name], gradient) <= BOUND, name


@pytest.mark.parametrize("case", MODELS)
def test_every_family_gets_the_losses_and_gradients_of_the_plain_path(models, case):
    assert_same(models[case], OPTIONS["all layers"])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_adapter_option_gets_the_losses_and_gradients_of_the_plain_path(models, option):
    assert_same(models["llama_tied"], OPTIONS[option])


def test_an_adapted_output_layer_gets_the_losses_and_gradients_of_the_plain_path(models):
    assert_same(models[UNTIED[0]], LoraSettings(4, 8, output=True))


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_the_output_layer_alone_can_be_trained(models, kernels: KernelForm):
    """Nothing below it has a gradient; what it gets is the gradient it has among others."""
    alone = LoraSettings(4, 8, attn_modules=(), mlp=False, output=True)
    sums, gradients = loss_and_gradients(loaded(models[UNTIED[0]], kernels, alone), batch())
    assert sums.tokens > 0
    assert sorted(gradients) == ["output.lora_a.weight", "output.lora_b.weight"]
    assert all(gradient.norm() > 0 for gradient in gradients.values())


def test_activation_checkpointing_changes_no_loss_and_no_gradient(models):
    assert_same(models["llama_tied"], OPTIONS["dropout"], activation_checkpointing=True)


def test_checkpointed_activations_are_recomputed(models, monkeypatch):
    calls = 0
    computed = FusedLayer.__call__

    def count(self: FusedLayer, *args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        return computed(self, *args, **settings)

    monkeypatch.setattr(FusedLayer, "__call__", count)
    for checkpointing, expected in ((False, 2), (True, 4)):
        calls = 0
        loss_and_gradients(
            loaded(models["llama"], "fused", LoraSettings(), activation_checkpointing=checkpointing), batch()
        )
        assert calls == expected, "two layers, computed once or twice"


def test_compiled_kernels_get_the_losses_and_gradients_of_the_plain_path(models):
    assert_same(models["llama_tied"], OPTIONS["all layers"], "compiled")


def test_one_compilation_serves_every_length(models):
    model = loaded(models["llama_tied"], "compiled", OPTIONS["all layers"])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((5, 3), (300,), (64, 64, 2), (400, 12)):
            assert loss_and_gradients(model, batch(lengths))[0].tokens > 0


def test_a_bf16_model_trains_fp32_adapters_and_stays_near_the_plain_path(models):
    rows = batch()
    plain = loaded(models["llama_tied"], "plain", OPTIONS["all layers"], dtype="bf16")
    fused = loaded(models["llama_tied"], "fused", OPTIONS["all layers"], dtype="bf16")
    assert {parameter.dtype for parameter in fused.adapter_parameters().values()} == {torch.float32}
    expected, gradients = loss_and_gradients(plain, rows)
    found, own = loss_and_gradients(fused, rows)
    assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    for name, gradient in gradients.items():
        assert relative_error(own[name], gradient.float()) < 5e-2, name


@pytest.mark.parametrize(
    ("option", "reason"), [("DoRA", "use_dora"), ("quantized base", "quantize_base"), ("all layers", None)]
)
def test_what_the_fast_path_lacks_is_said(models, option, reason):
    remarks = loaded(models["llama_tied"], "fused", OPTIONS[option]).computation.remarks
    assert [reason in remark for remark in remarks] == ([True] if reason else [])


def test_without_a_compiler_the_model_runs_uncompiled_and_says_so(models):
    can_compile.cache_clear()
    try:
        with inductor_config.patch({"cpp.cxx": ("/nonexistent/c++",)}):
            computation = loaded(models["llama_tied"], "compiled", OPTIONS["all layers"]).computation
    finally:
        can_compile.cache_clear()
    assert computation.kernels == "fused"
    assert "no C++ compiler was found" in computation.remarks[0]


def test_a_compiler_that_does_not_compile_is_said_and_done_without(models, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\necho no headers >&2; exit 1\n')
    broken.chmod(0o755)
    torch._dynamo.reset()
    can_compile.cache_clear()
    try:
        with inductor_config.patch({"cpp.cxx": (str(broken),), "force_disable_caches": True}):
            model = loaded(models["llama_tied"], "compiled", OPTIONS["all layers"])
    finally:
        can_compile.cache_clear()
        torch._dynamo.reset()
    assert model.computation.kernels == "fused"
    assert "compiling failed" in model.computation.remarks[0]
    assert loss_and_gradients(model, batch())[0].tokens > 0


def test_a_long_segment_is_attended_in_blocks_with_the_result_of_one(models, monkeypatch):
    """Also where shares are computed again: the blocks of 32 queries that see more than 64 keys."""
    rows = batch((200, 7))
    model = loaded(models["llama_tied"], "fused", OPTIONS["all layers"])
    whole, expected = loss_and_gradients(model, rows)
    for parameter in model.adapter_parameters().values():
        parameter.grad = None
    monkeypatch.setattr("providers.torchtune.fused_attention.QUERY_BLOCK", 32)
    monkeypatch.setattr("providers.torchtune.fused_attention.KEPT_KEYS", 64)
    blocks, gradients = loss_and_gradients(model, rows)
    assert blocks.loss == pytest.approx(whole.loss, rel=BOUND)
    for name, gradient in expected.items():
        assert relative_error(gradients[name], gradient) <= BOUND, name


def test_a_stream_is_filled_up_to_few_sizes_and_by_little():
    sizes = {tokens + Padding.of(tokens).tokens for tokens in range(2, 4097)}
    assert len([size for size in sizes if 1024 <= size < 2048]) == 16
    for tokens in range(2, 4097):
        assert 1 <= Padding.of(tokens).tokens <= max(16, tokens / 8)


def test_what_fills_a_stream_up_has_no_part_in_any_gradient(models, monkeypatch):
    rows = batch()
    model = loaded(models["llama_tied"], "fused", OPTIONS["all layers"])
    expected_sums, expected = loss_and_gradients(model, rows)
    for parameter in model.adapter_parameters().values():
        parameter.grad = None
    monkeypatch.setattr("providers.torchtune.fused_attention.BLOCK_STEP", 1)
    monkeypatch.setattr(Padding, "of", lambda _tokens: Padding(0))
    sums, gradients = loss_and_gradients(model, rows)
    assert sums.loss == pytest.approx(expected_sums.loss, rel=BOUND)
    for name, gradient in expected.items():
        assert relative_error(gradients[name], gradient) <= BOUND, name


def test_a_stream_far_longer_than_the_context_is_filled_up(models, tmp_path):
    make_model(tmp_path, "llama_tied", max_position_embeddings=64)
    rows = batch((64,) * 32)
    expected, _ = loss_and_gradients(loaded(tmp_path, "plain", OPTIONS["all layers"]), rows)
    sums, _ = loss_and_gradients(loaded(tmp_path, "fused", OPTIONS["all layers"]), rows)
    assert sums.loss == pytest.approx(expected.loss, rel=BOUND)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list mapped files under /proc")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", MODELS)
def test_a_model_whose_layers_are_joined_leaves_the_file_of_its_weights(
    models: dict[str, Path], case: str, dtype: Literal["bf16", "fp32"]
):
    """Or each weight would lie in memory twice: in the mapped file, and joined."""

    def mapped() -> bool:
        return str(models[case]) in Path("/proc/self/maps").read_text()

    plain = load_model(ModelConfig(models[case], LoraSettings(4, 8), dtype=dtype, kernels="plain"))
    assert mapped(), "the test sees no mapping where there is one"
    del plain
    fused = load_model(ModelConfig(models[case], LoraSettings(4, 8), dtype=dtype, kernels="fused"))
    assert not mapped()
    assert all(parameter.isfinite().all() for parameter in fused.module.parameters())
