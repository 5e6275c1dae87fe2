"""A linear layer on the CPU: each instruction set that the machine runs, with one thread and with all, beside torch's.

Calls take turns among copies of the weight that no cache holds together, as a model's layers do. Ours compute on torch's threads.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.library import isa_names, load
from apexk.kernels.cpu.linear import linear
from apexk.kernels.cpu.reference import linear_ref

from .registry import Call, Case, relative_error

LAYERS = {  # N, K: of Qwen3.5-35B-A3B, and odd sizes
    "qkv": (8192, 2048),
    "out": (2048, 4096),
    "shared-up": (512, 2048),
    "shared-down": (2048, 512),
    "odd": (65, 100),
}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
CHECKED_TOKENS = 4  # the reference is slow; test suites check every token
ALL_COPIES = 128 << 20  # bytes


def cases():
    try:
        isas = [name for name, runs in isa_names().items() if runs and name != "scalar"]
    except ImportError:  # not built: nothing to measure here
        return
    counts = sorted({1, load().apexk_default_threads()})
    for dtype, layer, tokens, threads in itertools.product((torch.bfloat16, torch.float16), LAYERS, TOKENS, counts):
        shape = {"layer": layer, "tokens": tokens, "threads": threads}
        for provider, isa in [*((f"cpu-{isa}", isa) for isa in isas), ("torch", None)]:
            make = functools.partial(_make, *LAYERS[layer], tokens, threads, dtype, isa)
            yield Case("cpu_linear", provider, "cpu", dtype, shape, make, product=True, isa=isa)


@functools.lru_cache(maxsize=1)
def _weights(outputs: int, inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    copies = -(-ALL_COPIES // (outputs * inputs * dtype.itemsize))
    first = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    return [first, *(first.clone() for _ in range(min(copies, 256) - 1))]


def _make(outputs: int, inputs: int, tokens: int, threads: int, dtype: torch.dtype, isa: str | None, device: str) -> Call:
    weights = _weights(outputs, inputs, dtype)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    turns, last = itertools.cycle(weights), []
    layer = functools.partial(linear, HostFFN(threads, isa), with_torch=True) if isa else F.linear

    def run():
        torch.set_num_threads(threads)
        last[:] = [layer(x, next(turns))]

    def error() -> float:
        return relative_error(last[0][:CHECKED_TOKENS], linear_ref(x[:CHECKED_TOKENS], weights[0]))

    moved = (outputs * inputs + tokens * (inputs + outputs)) * dtype.itemsize
    return Call(run, error, 2 * tokens * outputs * inputs, moved)
