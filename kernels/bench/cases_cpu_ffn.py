"""The FFN of missed experts on the CPU: each instruction set that the machine runs, with one thread and with all, beside
torch: a loop over the chosen experts, `grouped_mm`, and float32 products of weights widened beforehand.

Each shape in each dtype, with uniform routing and with one by Zipf's law. The roofs are those of as many threads as the
case has. Without a pattern `apexk kernels cpu --bench` takes the Qwen3 layer in BF16.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.library import isa_names, load
from apexk.kernels.cpu.reference import grouped_ffn_ref
from apexk.kernels.triton.shapes import MoeShape

from .inputs import LayerInputs, ffn_work, layer_inputs
from .registry import Call, Case, relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Layers small enough for any host: some experts of a Qwen3, a GLM-4.5-Air and a Mixtral layer, and odd sizes.
LAYERS = {
    "qwen3-64": MoeShape(64, 8, 2048, 512, 1),
    "glm-16": MoeShape(16, 8, 4096, 1408, 1),
    "mixtral-2": MoeShape(2, 2, 4096, 14336, 1),
    "odd-6": MoeShape(6, 3, 100, 72, 1),
    "odd-16": MoeShape(16, 4, 264, 40, 1),
}
ROUTING = {"uniform": 0.0, "zipf": 1.0}  # the exponent: an expert's share is its rank to the power of minus this
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
CHECKED_TOKENS = 4  # the reference is slow; test suites check every token


def cases():
    try:
        isas = [name for name, runs in isa_names().items() if runs and name != "scalar"]
    except ImportError:  # not built: nothing to measure here
        return
    counts = sorted({1, load().apexk_default_threads()})
    for dtype, layer, routing, tokens, threads in itertools.product(DTYPES, LAYERS, ROUTING, TOKENS, counts):
        shape = {"layer": layer, "routing": routing, "tokens": tokens, "threads": threads}
        for isa in isas:
            yield _case(dtype, shape, f"cpu-{isa}", functools.partial(_native, isa=isa, threads=threads), isa)
        for provider, run in {"torch-loop": _loop, "torch-grouped-mm": _grouped, "torch-fp32": _widened}.items():
            yield _case(dtype, shape, provider, functools.partial(_torch, run, threads=threads))


def _case(dtype, shape, provider, build, isa=None):
    layer, tokens = shape["layer"], shape["tokens"]

    def make(device):
        inputs = layer_inputs(LAYERS[layer], tokens, dtype, device, ROUTING[shape["routing"]])
        out = torch.full((tokens * LAYERS[layer].topk, LAYERS[layer].hidden), torch.nan)
        run = build(LAYERS[layer], inputs, out)
        return Call(run, lambda: _error(LAYERS[layer], inputs, out), *ffn_work(LAYERS[layer], inputs, dtype))

    return Case("cpu_ffn", provider, "cpu", dtype, shape, make, product=True, isa=isa)


def _blocks(inputs: LayerInputs) -> torch.Tensor:
    return torch.tensor([block.data_ptr() for block in inputs.pool], dtype=torch.int64)


def _error(shape: MoeShape, inputs: LayerInputs, out) -> float:
    first = inputs.ids[:CHECKED_TOKENS]
    want = torch.empty(first.numel(), shape.hidden)
    weights = inputs.weights[:CHECKED_TOKENS]
    grouped_ffn_ref(
        inputs.x[:CHECKED_TOKENS], _blocks(inputs), first, weights, range(shape.experts), want, intermediate=shape.inter
    )
    return relative_error(out[: first.numel()], want)


def _native(shape: MoeShape, inputs: LayerInputs, out, *, isa, threads):
    ffn, blocks = HostFFN(threads, isa), _blocks(inputs)
    arguments = (inputs.x, blocks, inputs.ids, inputs.weights, range(shape.experts), out)
    return lambda: ffn.run(*arguments, intermediate=shape.inter)


def _torch(run, shape: MoeShape, inputs: LayerInputs, out, *, threads):
    """`run` with the pairs of each expert known beforehand, which the native path works out in its own time."""
    flat = inputs.ids.flatten()
    order = flat.argsort(stable=True)
    loads = torch.bincount(flat, minlength=shape.experts)
    prepared = run(shape, inputs, out, order, loads)

    def timed():
        torch.set_num_threads(threads)
        prepared()

    return timed


def _per_expert(shape, inputs, out, order, loads, w13, w2, x):
    scale = inputs.weights.flatten()[:, None]
    groups = list(zip(range(shape.experts), order.split(loads.tolist()), strict=True))

    def run():
        for expert, pairs in groups:
            if len(pairs):
                both = x[pairs // shape.topk] @ w13[expert].T
                h = F.silu(both[:, : shape.inter]) * both[:, shape.inter :]
                out[pairs] = (h @ w2[expert].T).float() * scale[pairs]

    return run


def _loop(shape, inputs, out, order, loads):
    return _per_expert(shape, inputs, out, order, loads, inputs.w13, inputs.w2, inputs.x)


def _widened(shape, inputs, out, order, loads):
    return _per_expert(shape, inputs, out, order, loads, inputs.w13.float(), inputs.w2.float(), inputs.x.float())


def _grouped(shape, inputs, out, order, loads):
    ends = loads.cumsum(0).int()
    w13, w2 = inputs.w13.transpose(1, 2), inputs.w2.transpose(1, 2)
    scale = inputs.weights.flatten()[order, None]

    def run():
        both = F.grouped_mm(inputs.x[order // shape.topk], w13, offs=ends)
        h = F.silu(both[:, : shape.inter]) * both[:, shape.inter :]
        out[order] = F.grouped_mm(h, w2, offs=ends).float() * scale

    return run
