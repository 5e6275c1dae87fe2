"""Which launches the gate compiles: those that the wrappers make for the models' shapes, at decode and at prefill."""

import functools
from dataclasses import dataclass

import torch

from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.dequantise import dequantise
from apexk.kernels.triton.grouped_gemm import gated_gemm, grouped_gemm
from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.permute import permute, unpermute
from apexk.kernels.triton.reference import GROUP
from apexk.kernels.triton.routing import rank
from apexk.kernels.triton.shapes import MODELS
from apexk.kernels.triton.tune import choose_tiles

from .record import Launch, record

TOKENS = {"decode": 4, "batch": 32, "prefill": 512, "long": 4096}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GEMMS = ("_gated_gemm_kernel", "_grouped_gemm_kernel")
PAPER = ("qwen3.5-35b-a3b", "qwen3-next-80b", "glm-4.5-air")
# Cases are model, tokens, dtype. Those that lead to code seen before are dropped, so the lists may be generous.
QUICK = [("qwen3.5-35b-a3b", "decode", "bf16"), ("qwen3.5-35b-a3b", "long", "bf16"), ("qwen3.5-35b-a3b", "decode", "fp32")]
FULL = [
    *QUICK,
    *[("qwen3.5-35b-a3b", tokens, "bf16") for tokens in ("batch", "prefill")],
    *[("qwen3.5-35b-a3b", tokens, "fp16") for tokens in ("decode", "long")],
    *[("glm-4.5-air", tokens, "bf16") for tokens in TOKENS],
    *[("qwen3-next-80b", tokens, "bf16") for tokens in ("decode", "long")],
    *[("gpt-oss-20b", tokens, "bf16") for tokens in ("decode", "prefill")],
    ("glm-4.5-air", "long", "fp32"),
]


@dataclass
class Spec:
    label: str
    target: int
    launch: Launch


@functools.lru_cache
def specs(target, which="all") -> list[Spec]:
    """The different launches of the cases on one target, in order of first appearance: all; of QUICK only; or "gemms", the
    GEMMs of the paper's models' layers, which are what a target's tiles decide and what most of the time is spent in."""
    if which == "gemms":
        return [spec for spec in specs(target) if _of_a_layer(spec)]
    found = {}
    for model, tokens, dtype in QUICK if which == "quick" else FULL:
        shape, sizes = MODELS[model], (TOKENS[tokens], DTYPES[dtype], target)
        alone = which != "quick" and (model, tokens, dtype) in QUICK
        for launch in record(lambda: layer_calls(shape, *sizes, stand_alone=alone)):  # noqa: B023 - called at once
            found.setdefault(launch.key(), Spec(f"{model} {tokens} {dtype}", target, launch))
    return list(found.values())


def _of_a_layer(spec: Spec) -> bool:
    model, _, dtype = spec.label.split()
    return model in PAPER and dtype != "fp16" and spec.launch.kernel.__name__ in GEMMS and spec.launch.values["MAPPED"]


def layer_calls(shape, tokens, dtype, target, *, stand_alone):
    """What a layer of this shape launches on this target, and every other public kernel once. Tensors have no memory."""
    pairs = tokens * shape.topk

    def empty(*sizes, dtype=dtype):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    tiles = choose_tiles(pairs, shape.experts, shape.hidden, shape.inter, dtype, target)
    workspace = Workspace(tokens, shape.topk, shape.experts, shape.hidden, shape.inter, dtype, "meta", tiles)
    slots = shape.experts // 4
    x, out = empty(tokens, shape.hidden), empty(pairs, shape.hidden, dtype=torch.float32)
    w13, w2 = empty(slots, 2 * shape.inter, shape.hidden), empty(slots, shape.hidden, shape.inter)
    ids, weights = empty(tokens, shape.topk, dtype=torch.int64), empty(tokens, shape.topk, dtype=torch.float32)
    slot_of = empty(shape.experts, dtype=torch.int32)
    biases = dict(b13=empty(slots, 2 * shape.inter), b2=empty(slots, shape.hidden)) if shape.biases else {}
    step = workspace.begin(ids)
    moe_ffn(x, w13, w2, ids, weights, slot_of, out, step=step, activation=shape.activation, **biases)
    combine(out, shape.topk, x, x, topk_ids=ids)
    rank(ids, weights, shape.experts)
    if not stand_alone:
        return
    if tokens == TOKENS["long"]:  # in waves: rows of some experts only, into sums and out of them
        sums = empty(tokens, shape.hidden, dtype=torch.float32)
        for into, rest in ((sums, {}), (sums, {"partial": sums}), (x, {"partial": sums, "shared": x})):
            combine(out, shape.topk, into, topk_ids=ids, slot_of=slot_of, **rest)
    rows = step.routing.rows
    moved = permute(x, rows, shape.topk)
    unpermute(moved, rows, weights, tokens)
    offsets = empty(slots + 1, dtype=torch.int32)
    grouped_gemm(gated_gemm(moved, w13, offsets, shape.activation, tile=tiles.gated), w2, offsets, tile=tiles.down)
    for slot in (w13[0], w2[0]):
        n, k = slot.shape
        for bits in (8, 4):
            codes, scales = empty(n, k * bits // 8, dtype=torch.int8), empty(n, k // GROUP, dtype=torch.float16)
            dequantise(codes, scales, slot, bits)
