"""Attention of CUDA devices: what surrounds PyTorch's kernel everywhere, the kernel itself where there is a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from post_training.training.model import LoraSettings, ModelConfig, Segments
from providers.torchtune import varlen_attention as varlen
from providers.torchtune.fused_attention import Layout, segment_attention
from providers.torchtune.fused_kernels import Heads, Kernels
from providers.torchtune.model import load_model
from tests.torchtune_models import MODELS, make_model, random_tokens, relative_error

CONTEXT, LENGTHS = 512, (300, 1, 9)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def reference(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, _: Tensor, longest: int, __: int, **options: Any
) -> Tensor:
    """What `varlen_attn` is documented to compute, segment by segment, by PyTorch's own attention."""
    assert options == {"window_size": (-1, 0), "enable_gqa": q.shape[1] > k.shape[1]}
    lengths = edges.diff().tolist()
    assert edges[0] == 0
    assert longest == max(lengths)
    pieces = zip(*(each.transpose(0, 1).split(lengths, 1) for each in (q, k, v)), strict=True)
    done = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
    return torch.cat(done, 1).transpose(0, 1)


def batch(device: str = "cpu") -> Segments:
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    return Segments(torch.zeros_like(positions), positions, LENGTHS)


def angles(dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    turns = torch.outer(torch.arange(CONTEXT), 10000.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
    return turns.cos(), turns.sin()


def attention_and_gradient(attend: Any, qkv: Tensor) -> tuple[Tensor, Tensor]:
    given = qkv.clone().requires_grad_()
    out = attend(given)
    weights = torch.arange(out.numel(), device=out.device).view(out.shape).sin()
    (out.float() * weights).sum().backward()
    assert given.grad is not None
    return out.detach().float(), given.grad.float()


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("group", [1, 3])
def test_around_the_kernel_heads_turn_and_lie_as_in_attention_by_blocks(
    monkeypatch: pytest.MonkeyPatch, group: int, pairs: bool
):
    heads, kernels = Heads(2, group, 8, pairs), Kernels(compiled=False, gelu=False)
    qkv = torch.randn(sum(LENGTHS), (heads.query + 2 * heads.kv) * heads.dim, generator=torch.manual_seed(1))
    monkeypatch.setattr(varlen, "varlen_attn", reference)
    found = attention_and_gradient(varlen.varlen_attention(batch(), *angles(8), heads, kernels), qkv)
    layout = Layout.of(batch(), *angles(8), heads, padded=False)
    expected = attention_and_gradient(lambda x: segment_attention(x, layout, kernels), qkv)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [(torch.bfloat16, "cpu", "no CUDA device"), (torch.float32, "cuda", "16-bit types, not torch.float32")],
)
def test_where_the_kernel_does_not_work_the_reason_is_told(dtype: torch.dtype, device: str, reason: str):
    found = varlen.varlen_fault(Heads(1, 1, 8, pairs=False), dtype, torch.device(device))
    assert found is not None
    assert reason in found


def test_an_older_pytorch_without_the_kernel_is_no_fault_of_the_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    try:
        importlib.reload(varlen)
        reason = varlen.varlen_fault(Heads(1, 1, 8, pairs=False), torch.bfloat16, torch.device("cuda"))
    finally:
        monkeypatch.undo()
        importlib.reload(varlen)
    assert reason == "this PyTorch has no varlen_attn"


@on_gpu
@pytest.mark.parametrize("group", [1, 3])
def test_on_a_gpu_the_kernel_gives_what_blocks_give(group: int):
    heads, kernels = Heads(2, group, 64, pairs=False), Kernels(compiled=False, gelu=False)
    assert varlen.varlen_fault(heads, torch.bfloat16, torch.device("cuda")) is None
    qkv = torch.randn(sum(LENGTHS), (heads.query + 2 * heads.kv) * heads.dim).to("cuda", torch.bfloat16)
    found = attention_and_gradient(varlen.varlen_attention(batch("cuda"), *angles(64, "cuda"), heads, kernels), qkv)
    layout = Layout.of(batch("cuda"), *angles(64, "cuda"), heads, padded=False)
    expected = attention_and_gradient(lambda x: segment_attention(x, layout, kernels), qkv)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-2


@on_gpu
@pytest.mark.parametrize("case", MODELS)
def test_on_a_gpu_a_model_computes_what_its_plain_form_does(tmp_path: Path, case: str):
    make_model(tmp_path, case, max_position_embeddings=CONTEXT)
    hidden = []
    for kernels in ("plain", "fused"):
        model = load_model(ModelConfig(tmp_path, LoraSettings(4, 8), device="cuda", kernels=kernels))
        tokens = random_tokens(sum(LENGTHS), 1).cuda()
        hidden.append(model.hidden_states(Segments(tokens, batch("cuda").positions, LENGTHS)).detach().float())
    assert relative_error(hidden[1], hidden[0]) < 3e-2
