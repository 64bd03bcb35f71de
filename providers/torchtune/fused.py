"""The fast path: torchtune's decoder, with its weights and adapters, computed over a flat stream by other means.

`FusedDecoder` reads a `TransformerDecoder` layer by layer and keeps, of each, the products and the scales. What it
computes is the same function. A layer of the decoder is

    h = x + output_proj(attention(rope(q_proj(n)), rope(k_proj(n)), v_proj(n)))   with n = sa_norm(x)
    x = h + w2(activation(w1(m)) * w3(m))                                         with m = mlp_norm(h)

and here: q, k, v and gate, up are one product each (`fused_linear`), attention runs over the pairs of positions that
see each other (`fused_attention`; on a CUDA device `varlen_attention`), and everything between products is one pass
over memory (`fused_kernels`). The residual addition is part of the norm after it, so a layer hands on a sum that is
still to be made: (h, y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from post_training.training.kernels import compiling, varying
from post_training.training.model import Segments
from providers.torchtune import shim
from providers.torchtune.architecture import Architecture
from providers.torchtune.convert import deinterleave
from providers.torchtune.fused_attention import Layout, Padding, compile_attention, segment_attention
from providers.torchtune.fused_kernels import Heads, Kernels
from providers.torchtune.fused_linear import FusedProjection, PlainProjection, projection
from providers.torchtune.varlen_attention import varlen_attention, varlen_fault

Projection = FusedProjection | PlainProjection
Attention = Callable[[Tensor], Tensor]
"""Of one batch: [T, (K G + 2 K) dim], all heads of q, k and v, to [T, K G dim]."""

TYPICAL_TOKENS = 1024


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's fp32 scale [D] and epsilon, and the kernels that compute it."""

    scale: Tensor
    eps: float
    kernels: Kernels

    @classmethod
    def of(cls, module: nn.Module, gemma: bool, kernels: Kernels) -> Norm:
        scale = cast(Tensor, module.scale).detach().to(torch.float32, copy=True)
        # Gemma stores how much its scales differ from one.
        return cls(1 + scale if gemma else scale, cast(float, module.eps), kernels)

    def __call__(self, h: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """h + y, where there is a y, and its norm: [T, D] each."""
        if y is None:
            return h, cast(Tensor, _Norm.apply(h, self))
        return cast(tuple[Tensor, Tensor], _AddNorm.apply(h, y, self))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, norm: Norm) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(h)
        return norm.kernels.norm(h, norm.scale, norm.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        norm: Norm = ctx.norm
        return norm.kernels.norm_backward(gradients[0], ctx.saved_tensors[0], norm.scale, norm.eps), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total, normed = norm.kernels.add_norm(h, y, norm.scale, norm.eps)
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        norm: Norm = ctx.norm
        (total,) = ctx.saved_tensors
        d_total, d_normed = gradients
        if d_normed is None:
            d = d_total
        elif d_total is None:  # the last norm: nothing reads the sum itself
            d = norm.kernels.norm_backward(d_normed, total, norm.scale, norm.eps)
        else:
            d = norm.kernels.add_norm_backward(d_total, d_normed, total, norm.scale, norm.eps)
        return d, d, None


class _Gate(torch.autograd.Function):
    """activation(gate) * up of [T, 2F]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate_up)
        return kernels.gate(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.kernels.gate_backward(gradients[0], ctx.saved_tensors[0])[0], None


class _GatedMlp(torch.autograd.Function):
    """down(activation(gate) * up); of the latter, [T, F], nothing is kept: the gate's backward pass makes it again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: FusedProjection, down: FusedProjection, kernels: Kernels, *_adapters: Tensor
    ) -> Tensor:
        noise = gate_up.noise(x)
        wide, low = gate_up.product(x, noise)
        active = kernels.gate(wide)
        down_noise = down.noise(active)
        y, down_low = down.product(active, down_noise)
        ctx.gate_up, ctx.down, ctx.kernels, ctx.masks = gate_up, down, kernels, len(noise)
        ctx.save_for_backward(x, wide, low, down_low, *noise, *down_noise)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        gate_up: FusedProjection = ctx.gate_up
        down: FusedProjection = ctx.down
        x, wide, low, down_low, *masks = ctx.saved_tensors
        noise, down_noise = masks[: ctx.masks], masks[ctx.masks :]
        d_active, d_down_low = down.input_gradient(dy, down_noise)
        d_wide, active = ctx.kernels.gate_backward(d_active, wide)
        d_down = down.adapter_gradients(active, dy, down_low, d_down_low, down_noise)
        dx, d_low = gate_up.input_gradient(d_wide, noise, ctx.needs_input_grad[0])
        d_gate_up = gate_up.adapter_gradients(x, d_wide, low, d_low, noise)
        return dx, None, None, None, *d_gate_up, *d_down


class FusedLayer:
    """One transformer layer. `qkv`, `output`, `gate_up` and `down` are its four products."""

    def __init__(self, layer: nn.Module, architecture: Architecture, kernels: Kernels) -> None:
        attn, mlp, gemma = cast(Any, layer).attn, cast(Any, layer).mlp, architecture.family == "gemma"
        self._kernels = kernels
        self.attn_norm = Norm.of(cast(Any, layer).sa_norm, gemma, kernels)
        self.mlp_norm = Norm.of(cast(Any, layer).mlp_norm, gemma, kernels)
        self.qkv = projection([attn.q_proj, attn.k_proj, attn.v_proj], _head_orders(architecture))
        self.output = projection([attn.output_proj])
        self.gate_up = projection([mlp.w1, mlp.w3])
        self.down = projection([mlp.w2])

    @property
    def products(self) -> tuple[Projection, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def __call__(self, h: Tensor, y: Tensor | None, attend: Attention) -> tuple[Tensor, Tensor]:
        """The residual stream as (h, y), the sum of which is meant: [T, D] each."""
        h, x = self.attn_norm(h, y)
        y = self.output(attend(self.qkv(x)))
        h, x = self.mlp_norm(h, y)
        return h, self._mlp(x)

    def _mlp(self, x: Tensor) -> Tensor:
        gate_up, down, kernels = self.gate_up, self.down, self._kernels
        if isinstance(gate_up, FusedProjection) and isinstance(down, FusedProjection):
            adapters = (*gate_up.parameters, *down.parameters)
            return cast(Tensor, _GatedMlp.apply(x, gate_up, down, kernels, *adapters))
        return down(cast(Tensor, _Gate.apply(gate_up(x), kernels)))


def _head_orders(a: Architecture) -> list[Tensor | None]:
    """Outputs of q and k by halves of a head, not by pairs: a CPU turns halves in whole registers."""
    if not a.interleaved_rope:
        return [None, None, None]
    q, k = (deinterleave(torch.arange(heads * a.head_dim), heads) for heads in (a.num_heads, a.num_kv_heads))
    return [q, k, None]


class FusedDecoder:
    """`TransformerDecoder.forward` up to and with its last norm, over segments.

    The module keeps its parameters: adapters are trained in it, in fp32, and the weights of its layers become views of
    the joined ones.

    Attributes:
        blocks_because: why attention is computed block by block, by products, and not by one kernel for all segments;
            None where it is not.
    """

    def __init__(
        self, module: shim.TransformerDecoder, architecture: Architecture, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        self._module = module
        self._layers = [FusedLayer(layer, architecture, kernels) for layer in cast(Any, module.layers)]
        self._norm = Norm.of(cast(nn.Module, module.norm), architecture.family == "gemma", kernels)
        self._kernels = kernels
        self._heads = heads_of(architecture, joined=isinstance(self._layers[0].qkv, FusedProjection))
        self.blocks_because = varlen_fault(self._heads, dtype, cast(Any, module).tok_embeddings.weight.device)
        self._cos, self._sin = _angles(cast(Any, module.layers)[0].attn.pos_embeddings, architecture)
        products = [product for layer in self._layers for product in layer.products]
        fused = [product for product in products if isinstance(product, FusedProjection)]
        self._copies = [copy for product in fused for copy in product.copies()]
        if len(fused) == len(products):
            _leave_files(module, fused)

    def hidden_states(self, segments: Segments, checkpointing: bool, dropout: bool) -> Tensor:
        """Final hidden states after the last norm, [T, D]."""
        self._copy_adapters()
        # Dropout draws a number for each input: more inputs, other numbers.
        padding = Padding(0) if dropout else Padding.of(len(segments.tokens))
        padded = padding.apply(segments)
        attend = self._attention(padded, padding.tokens > 0)
        h: Tensor = self._module.tok_embeddings(padded.tokens)
        y: Tensor | None = None
        for layer in self._layers:
            run = partial(layer, attend=attend)
            if checkpointing and torch.is_grad_enabled():
                # Only dropout draws numbers, and must draw the same ones when the layer is computed again.
                h, y = checkpoint(run, h, y, use_reentrant=False, preserve_rng_state=dropout)
            else:
                h, y = run(h, y)
        return self._norm(h, y)[1][: len(segments.tokens)]

    def _attention(self, batch: Segments, padded: bool) -> Attention:
        if self.blocks_because is None:
            return varlen_attention(batch, self._cos, self._sin, self._heads, self._kernels)
        layout = Layout.of(batch, self._cos, self._sin, self._heads, padded)
        return partial(segment_attention, layout=layout, kernels=self._kernels)

    @torch.no_grad()
    def _copy_adapters(self) -> None:
        """Bring the products' copies of the adapters up to date. (Fused optimizers leave no mark to go by.)"""
        if not self._copies:
            return
        copies, parameters, factors, orders = zip(*self._copies, strict=True)
        rows = [p.detach() if order is None else p[order] for p, order in zip(parameters, orders, strict=True)]
        foreach: Any = torch  # these two are public in all but name: PyTorch's optimizers are made of them
        foreach._foreach_copy_(list(copies), foreach._foreach_mul(rows, list(factors)))


def _leave_files(module: nn.Module, fused: Sequence[FusedProjection]) -> None:
    """Give the weights that are not joined memory of their own.

    Loaded weights are parts of a mapped file, which stays in memory as long as one of them does; the joined weights'
    originals, nearly all of it, are of no use any more.
    """
    joined = {product.weight.untyped_storage().data_ptr() for product in fused}
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.untyped_storage().data_ptr() not in joined:
            parameter.data = parameter.data.clone()


def heads_of(a: Architecture, joined: bool) -> Heads:
    """`joined`: q, k and v come of one product, which gives halves of a head; the modules' own give pairs."""
    return Heads(a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim, pairs=a.interleaved_rope and not joined)


@torch.no_grad()
def compiled_kernels(a: Architecture, joined: bool, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Kernels, compiled at a typical size, so that their code depends on the model and not on the first batch.

    Raises:
        CompilingFailed.
    """
    kernels = Kernels(compiled=True, gelu=a.family == "gemma")
    scale = torch.ones(a.embed_dim, device=device)

    def rows(width: int) -> Tensor:
        return varying(torch.zeros(TYPICAL_TOKENS, width, dtype=dtype, device=device), 0)

    def stream() -> Tensor:
        return rows(a.embed_dim)

    with compiling():
        kernels.norm(stream(), scale, a.norm_eps)
        kernels.add_norm(stream(), stream(), scale, a.norm_eps)
        kernels.norm_backward(stream(), stream(), scale, a.norm_eps)
        kernels.add_norm_backward(stream(), stream(), stream(), scale, a.norm_eps)
        kernels.gate(rows(2 * a.intermediate_dim))
        kernels.gate_backward(rows(a.intermediate_dim), rows(2 * a.intermediate_dim))
        compile_attention(kernels, heads_of(a, joined), dtype, device, TYPICAL_TOKENS)
    return kernels


def _angles(rope: nn.Module, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """cos and sin by position, [context, head_dim / 2] fp32, out of a torchtune table."""
    cache = cast(Tensor, rope.cache)
    if architecture.interleaved_rope:
        return cache[..., 0].contiguous(), cache[..., 1].contiguous()
    half = architecture.head_dim // 2
    return cache[:, :half].contiguous(), cache[:, 2 * half : 3 * half].contiguous()
