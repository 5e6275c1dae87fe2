"""Compare the CPU kernels with their references on small layers, once for each instruction set that this machine runs.

`main` is `apexk kernels cpu --check`. The test suite goes much further; this is for a machine that has only the package.
"""

import argparse

import torch

from apexk.kernels.cpu import library
from apexk.kernels.cpu.ffn import ACTIVATIONS, HostFFN
from apexk.kernels.cpu.linear import linear
from apexk.kernels.cpu.reference import grouped_ffn_ref, linear_ref

from .registry import DTYPE_NAMES, relative_error

# T, topk, H, I, experts: one token; odd sizes; more tokens for an expert than one unit of work holds
LAYERS = {"one token": (1, 2, 64, 48, 4), "odd sizes": (9, 3, 100, 72, 6), "crowded": (230, 2, 96, 80, 3)}
LINEARS = {"one token": (1, 64, 48), "odd sizes": (9, 100, 65), "crowded": (230, 96, 80)}  # T, K, N
# Of the largest value: an edge between two roundings of the activated row may fall either way.
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}

SUMS = 1e-5  # a linear layer rounds but once, which is not counted


def check_layer(ffn: HostFFN, sizes, dtype, activation) -> float:
    """Relative error against float64; infinite where a row is missing."""
    tokens, topk, H, I, experts = sizes
    torch.manual_seed(tokens)
    weights = (torch.randn(experts, 3 * I * H + 2 * I + H) / min(H, I) ** 0.5).to(dtype)
    blocks = torch.tensor([block.data_ptr() for block in weights], dtype=torch.int64)
    x = torch.randn(tokens, H).to(dtype)
    ids = torch.rand(tokens, experts).argsort(dim=1)[:, :topk].contiguous()
    out, want = torch.full((2, tokens * topk, H), torch.nan)
    arguments = (x, blocks, ids, torch.rand(tokens, topk), range(experts))
    ffn.run(*arguments, out, intermediate=I, activation=activation, biases=True)
    grouped_ffn_ref(*arguments, want, intermediate=I, activation=activation, biases=True)
    return relative_error(out, want)


def check_linear(ffn: HostFFN, sizes, dtype) -> float:
    """Relative error against float64, beyond what one rounding costs."""
    tokens, inputs, outputs = sizes
    torch.manual_seed(tokens)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((tokens, inputs), (outputs, inputs), (outputs,)))
    want = linear_ref(x, weight, bias)
    half = torch.finfo(dtype).eps / 2 * want.abs()
    beyond = ((linear(ffn, x, weight, bias).double() - want).abs() - half).clamp(min=0)
    return relative_error(want + beyond, want)


def main(argv=None) -> int:
    argparse.ArgumentParser(prog="apexk kernels cpu --check", description=__doc__.split("\n\n")[0]).parse_args(argv)
    failed = 0
    for isa, runs in library.isa_names().items():
        if not runs:
            print(f"not run  {isa}: this machine does not offer it")
            continue
        with HostFFN(isa=isa) as ffn:
            for dtype, allowed in TOLERANCE.items():
                errors = [("ffn", name, max(check_layer(ffn, sizes, dtype, activation) for activation in ACTIVATIONS), allowed) for name, sizes in LAYERS.items()]
                errors += [("linear", name, check_linear(ffn, sizes, dtype), SUMS) for name, sizes in LINEARS.items()]
                for what, name, error, most in errors:
                    bad = not error <= most
                    failed += bad
                    print(f"{'FAILED ' if bad else 'ok     '} {isa:12} {what:6} {name:10} {DTYPE_NAMES[dtype]}  error {error:.1e}")
    print(f"{failed} failures")
    return 1 if failed else 0


