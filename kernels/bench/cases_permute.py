"""Moving rows: permute and unpermute alone. The engine's GEMMs do both in passing; this is what that saves."""

import torch

from apexk.kernels.triton.permute import permute, unpermute
from apexk.kernels.triton.reference import permute_ref, route_ref, unpermute_ref
from apexk.kernels.triton.shapes import MODELS

from .inputs import drawn_ids
from .registry import Call, Case, relative_error


def cases():
    for model in ("qwen3.5-35b-a3b", "glm-4.5-air"):
        for tokens in (32, 4096):
            for op in ("permute", "unpermute"):
                yield _case(op, model, tokens)


def _case(op, model, tokens):
    def make(device):
        shape = MODELS[model]
        ids, weights = (t.to(device) for t in drawn_ids(shape, tokens))
        rows = route_ref(ids, torch.arange(shape.experts, dtype=torch.int32, device=device), shape.experts).rows
        x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
        return (_permute if op == "permute" else _unpermute)(x, rows, weights)

    return Case(op, "triton", "cuda", torch.bfloat16, {"model": model, "tokens": tokens}, make)


def _permute(x, rows, weights):
    out, topk = x.new_empty(rows.numel(), x.shape[1]), weights.shape[1]
    moved = (x.numel() + out.numel()) * x.element_size() + rows.numel() * 4
    return Call(
        lambda: permute(x, rows, topk, out=out), lambda: relative_error(out, permute_ref(x, rows, topk)), 0, moved
    )


def _unpermute(x, rows, weights):
    y, out = permute_ref(x, rows, weights.shape[1]), torch.empty_like(x)
    moved = (y.numel() + out.numel()) * x.element_size() + rows.numel() * 8
    return Call(
        lambda: unpermute(y, rows, weights, x.shape[0], out=out),
        lambda: relative_error(out, unpermute_ref(y, rows, weights, x.shape[0])), 2 * y.numel(), moved,
    )  # fmt: skip
