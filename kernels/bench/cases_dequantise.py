"""One expert out of its int8 or int4 payload, beside torch's own operations: what a lossy transfer pays on the GPU."""

import torch

from apexk.kernels.triton.dequantise import dequantise
from apexk.kernels.triton.reference import GROUP, dequantise_ref
from apexk.kernels.triton.shapes import MODELS

from .registry import Call, Case, relative_error


def cases():
    for model in ("qwen3.5-35b-a3b", "glm-4.5-air"):
        for bits in (8, 4):
            for provider, function in (("triton", dequantise), ("torch", dequantise_ref)):
                yield _case(model, bits, provider, function)


def _case(model, bits, provider, function):
    def make(device):
        shape = MODELS[model]
        matrices = [_matrix(n, k, bits, device) for n, k in ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter))]
        moved = sum(t.numel() * t.element_size() for matrix in matrices for t in matrix)

        def run():
            for codes, scales, out in matrices:
                function(codes, scales, out, bits)

        def error():
            return max(relative_error(out, _exact(codes, scales, out, bits)) for codes, scales, out in matrices)

        return Call(run, error, 0, moved)

    return Case("dequantise", provider, "cuda", torch.bfloat16, {"model": model, "bits": bits}, make)


def _matrix(n, k, bits, device):
    codes = torch.randint(-128, 128, (n, k * bits // 8), dtype=torch.int8, device=device)
    return codes, torch.rand(n, k // GROUP, device=device).half(), torch.empty(n, k, dtype=torch.bfloat16, device=device)


def _exact(codes, scales, out, bits):
    want = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    dequantise_ref(codes, scales, want, bits)
    return want
