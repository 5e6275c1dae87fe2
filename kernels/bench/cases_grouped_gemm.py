"""The two GEMMs alone, on rows in expert order: ours, and torch's grouped_mm (which wants weights as [E, K, N])."""

import torch

from apexk.kernels.triton.grouped_gemm import gated_gemm, grouped_gemm
from apexk.kernels.triton.reference import gated_gemm_ref, grouped_gemm_ref
from apexk.kernels.triton.shapes import MODELS

from .inputs import layer_inputs
from .registry import Call, Case, relative_error


def cases():
    for model in ("qwen3.5-35b-a3b", "glm-4.5-air"):
        for tokens in (1, 4, 16, 32, 512, 4096):
            yield _case("gated_gemm", "triton", model, tokens)
            for provider in ("triton", "torch-grouped-mm"):
                yield _case("grouped_gemm", provider, model, tokens)


def _case(op, provider, model, tokens):
    def make(device):
        shape = MODELS[model]
        inputs = layer_inputs(shape, tokens, torch.bfloat16, device)
        counts = torch.bincount(inputs.ids.flatten(), minlength=shape.experts)
        offsets = torch.zeros(shape.experts + 1, dtype=torch.int32, device=device)
        offsets[1:] = counts.cumsum(0)
        w = inputs.w13 if op == "gated_gemm" else inputs.w2
        x = torch.randn(inputs.ids.numel(), w.shape[2], device=device).bfloat16()
        return _call(op, provider, x, w, offsets, inputs.distinct)

    return Case(op, provider, "cuda", torch.bfloat16, {"model": model, "tokens": tokens}, make, product=True)


def _call(op, provider, x, w, offsets, distinct):
    width = w.shape[1] // 2 if op == "gated_gemm" else w.shape[1]
    out = x.new_empty(x.shape[0], width)

    def run():
        if provider == "torch-grouped-mm":
            out.copy_(torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offsets[1:]))
        elif op == "gated_gemm":
            gated_gemm(x, w, offsets, out=out)
        else:
            grouped_gemm(x, w, offsets, out=out)

    def error():
        reference = gated_gemm_ref if op == "gated_gemm" else grouped_gemm_ref
        return relative_error(out, reference(x, w, offsets, compute_dtype=torch.float32))

    moved = (distinct * w.shape[1] * w.shape[2] + x.numel() + out.numel()) * x.element_size()
    return Call(run, error, 2 * x.shape[0] * w.shape[1] * w.shape[2], moved)
