"""The public kernels as PyTorch operators, `torch.ops.apexk.*`, so that torch.compile and torch.export see through them.

Importing this file registers them; it needs no Triton. Each has a fake kernel that gives the output's shape without a
launch. The engine calls the plain functions: an operator's dispatch costs the host some ten microseconds, and operators
cannot share a workspace.
"""

import torch
from torch import Tensor

from . import combine as _combine
from . import grouped_gemm as _grouped_gemm
from . import moe_ffn as _moe_ffn
from . import permute as _permute
from . import routing as _routing


@torch.library.custom_op("apexk::route", mutates_args=())
def route(topk_ids: Tensor, slot_of: Tensor | None, num_slots: int, block_m: int) -> Tensor:
    """A routing's buffer, int32; `routing.unpack` gives its parts."""
    buffer = _routing_buffer(topk_ids, slot_of, num_slots, block_m)
    _routing.route(topk_ids, slot_of, num_slots, block_m=block_m, out=buffer)
    return buffer


@route.register_fake
def _routing_buffer(topk_ids, slot_of, num_slots, block_m):
    num_experts = num_slots if slot_of is None else slot_of.numel()
    size = _routing.routing_ints(topk_ids.numel(), num_experts, num_slots, block_m)
    return topk_ids.new_empty(size, dtype=torch.int32)


@torch.library.custom_op("apexk::rank", mutates_args=())
def rank(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """int32 [3, E]: loads, the bits of the fp32 scores, order."""
    out = topk_ids.new_empty(3, num_experts, dtype=torch.int32)
    _routing.rank(topk_ids, topk_weights, num_experts, out=out)
    return out


@rank.register_fake
def _(topk_ids, topk_weights, num_experts):
    return topk_ids.new_empty(3, num_experts, dtype=torch.int32)


@torch.library.custom_op("apexk::permute", mutates_args=())
def permute(x: Tensor, rows: Tensor, topk: int) -> Tensor:
    return _permute.permute(x, rows, topk)


@permute.register_fake
def _(x, rows, topk):
    return x.new_empty(rows.shape[0], x.shape[1])


@torch.library.custom_op("apexk::unpermute", mutates_args=())
def unpermute(y: Tensor, rows: Tensor, topk_weights: Tensor) -> Tensor:
    return _permute.unpermute(y, rows, topk_weights, topk_weights.shape[0])


@unpermute.register_fake
def _(y, rows, topk_weights):
    return y.new_empty(topk_weights.shape[0], y.shape[1])


@torch.library.custom_op("apexk::grouped_gemm", mutates_args=())
def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    return _grouped_gemm.grouped_gemm(x, w, offsets, bias=bias)


@grouped_gemm.register_fake
def _(x, w, offsets, bias=None):
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("apexk::gated_gemm", mutates_args=())
def gated_gemm(
    x: Tensor, w13: Tensor, offsets: Tensor, activation: str = "silu", bias: Tensor | None = None
) -> Tensor:
    return _grouped_gemm.gated_gemm(x, w13, offsets, activation, bias=bias)


@gated_gemm.register_fake
def _(x, w13, offsets, activation="silu", bias=None):
    return x.new_empty(x.shape[0], w13.shape[1] // 2)


@torch.library.custom_op("apexk::moe_ffn", mutates_args=("out",))
def moe_ffn(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor, slot_of: Tensor, out: Tensor,
    activation: str = "silu", b13: Tensor | None = None, b2: Tensor | None = None, weight_on_input: bool = False,
) -> None:  # fmt: skip
    _moe_ffn.moe_ffn(
        x, w13, w2, topk_ids, topk_weights, slot_of, out, activation=activation, b13=b13, b2=b2,
        weight_on_input=weight_on_input,
    )  # fmt: skip


@torch.library.custom_op("apexk::combine", mutates_args=("out",))
def combine(
    pairs: Tensor, topk: int, out: Tensor, shared: Tensor | None = None, topk_ids: Tensor | None = None,
    slot_of: Tensor | None = None, partial: Tensor | None = None,
) -> None:  # fmt: skip
    _combine.combine(pairs, topk, out, shared, topk_ids=topk_ids, slot_of=slot_of, partial=partial)


@moe_ffn.register_fake
@combine.register_fake
def _(*arguments, **options):
    """Both write `out` and return nothing."""
