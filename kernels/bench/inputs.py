"""Inputs of a MoE layer for benchmarks, made from a seed: routed tokens and a pool that holds every expert."""

import functools
from dataclasses import dataclass

import torch

from apexk.kernels.triton.shapes import MoeShape

ALIGN = 4096  # expert blocks start at multiples of 4 KiB, as in the real pool
SKEW = 0.7  # experts are drawn with probability 1/rank**SKEW: real routing is far from uniform


@dataclass
class LayerInputs:
    x: torch.Tensor  # [T, H]
    pool: torch.Tensor  # [E, stride] expert blocks
    w13: torch.Tensor  # [E, 2I, H] view
    w2: torch.Tensor  # [E, H, I] view
    ids: torch.Tensor  # [T, topk] int64
    weights: torch.Tensor  # [T, topk] fp32
    slot_of: torch.Tensor  # [E] int32, expert e in slot e
    distinct: int  # experts that some token chose


@functools.lru_cache(maxsize=2)  # the same pool serves every token count of a model
def _pool(shape: MoeShape, dtype, device):
    elements = 3 * shape.hidden * shape.inter
    stride = -(-elements * dtype.itemsize // ALIGN) * ALIGN // dtype.itemsize
    generator = torch.Generator(device).manual_seed(1)
    pool = torch.empty(shape.experts, stride, dtype=dtype, device=device)
    for block in pool:  # one at a time: a float32 copy of all would not fit
        block.copy_(torch.randn(stride, generator=generator, device=device) / shape.hidden**0.5)
    return pool


def drawn_ids(shape: MoeShape, tokens, skew=SKEW):
    """ids int64 [T, topk], different within a token, and weights fp32 [T, topk], on the CPU. `skew` 0: uniform."""
    generator = torch.Generator().manual_seed(2)
    odds = 1 / torch.arange(1, shape.experts + 1) ** skew
    ids = torch.multinomial(odds.expand(tokens, -1), shape.topk, generator=generator)
    return ids, torch.softmax(torch.randn(tokens, shape.topk, generator=generator), -1)


def layer_inputs(shape: MoeShape, tokens, dtype, device, skew=SKEW) -> LayerInputs:
    pool = _pool(shape, dtype, device)
    split, stride = 2 * shape.inter * shape.hidden, pool.stride(0)
    ids, weights = drawn_ids(shape, tokens, skew)
    x = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(3))
    return LayerInputs(
        x.to(device, dtype), pool,
        pool.as_strided((shape.experts, 2 * shape.inter, shape.hidden), (stride, shape.hidden, 1)),
        pool.as_strided((shape.experts, shape.hidden, shape.inter), (stride, shape.inter, 1), split),
        ids.to(device), weights.to(device), torch.arange(shape.experts, dtype=torch.int32, device=device),
        ids.unique().numel(),
    )  # fmt: skip


def ffn_work(shape: MoeShape, inputs: LayerInputs, dtype) -> tuple[int, int]:
    """(flops, bytes) that the FFN needs at least: each chosen expert read once, rows in, fp32 rows by pair out."""
    pairs, size = inputs.ids.numel(), dtype.itemsize
    moved = inputs.distinct * shape.expert_bytes(size) + inputs.x.numel() * size + pairs * shape.hidden * 4
    return 6 * pairs * shape.hidden * shape.inter, moved
