"""The sum over top-k at the end of a layer, with the shared expert's output."""

import torch

from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.reference import combine_ref
from apexk.kernels.triton.shapes import MODELS

from .registry import Call, Case, relative_error


def cases():
    for model in ("qwen3.5-35b-a3b", "glm-4.5-air"):
        for tokens in (1, 32, 4096):
            for provider in ("triton", "torch"):
                yield _case(model, tokens, provider)


def _case(model, tokens, provider):
    def make(device):
        shape = MODELS[model]
        pairs = torch.randn(tokens * shape.topk, shape.hidden, device=device)
        shared = torch.randn(tokens, shape.hidden, device=device).bfloat16()
        out = torch.empty_like(shared)

        def by_torch():
            out.copy_(pairs.view(tokens, shape.topk, -1).sum(1) + shared)

        def error():
            want = torch.empty_like(out)
            combine_ref(pairs, shape.topk, want, shared)
            return relative_error(out, want)

        run = by_torch if provider == "torch" else lambda: combine(pairs, shape.topk, out, shared)
        return Call(run, error, pairs.numel() + shared.numel(), pairs.numel() * 4 + 2 * shared.numel() * 2)

    return Case("combine", provider, "cuda", torch.bfloat16, {"model": model, "tokens": tokens}, make)
