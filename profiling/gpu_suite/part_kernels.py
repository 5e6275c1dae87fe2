"""Kernels against their float64 references on a small matrix of layers: Triton's on the GPU or in the interpreter, the
CPU's on the host. Everything that must not be read is NaN."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import torch

from .environment import ROOT
from .pieces import Context, Skip, piece

# Largest error against float64, relative to the largest value of the row.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

# Tokens, choices, hidden, intermediate, experts, resident: less than a tile, odd sizes with one token, every expert chosen.
LAYERS = {"small": (7, 3, 64, 48, 10, 4), "one token": (1, 2, 72, 40, 6, 6), "all chosen": (17, 8, 96, 80, 8, 5)}


@piece("kernels")
def grouped_ffn(context: Context) -> dict:
    """`moe_ffn` over the resident slots, in every dtype."""
    _ready(context)
    from apexk.kernels.triton.moe_ffn import moe_ffn
    from apexk.kernels.triton.reference import moe_ffn_ref

    errors = {}
    for name, sizes in LAYERS.items():
        for dtype in TOLERANCE:
            x, w13, w2, ids, weights, slot_of = _layer(sizes, dtype)
            want = torch.full((ids.numel(), x.shape[1]), float("nan"), dtype=torch.float64)
            moe_ffn_ref(x, w13, w2, ids, weights, slot_of, want)
            inputs = [t.to(context.device) for t in (x, w13, w2, ids, weights, slot_of)]
            got = torch.full(want.shape, float("nan"), device=context.device)
            moe_ffn(*inputs, got)
            errors[f"{name}, {_short(dtype)}"] = _compare(got, want, dtype)
    return errors


@piece("kernels")
def combine_rows(context: Context) -> dict:
    """`combine` equals its reference bit for bit: the order of the sum is part of the promise."""
    _ready(context)
    from apexk.kernels.triton.combine import combine
    from apexk.kernels.triton.reference import combine_ref

    for dtype in TOLERANCE:
        pairs, shared = torch.randn(21, 72), torch.randn(7, 72).to(dtype)
        want, got = torch.empty(7, 72, dtype=dtype), torch.empty(7, 72, dtype=dtype, device=context.device)
        combine_ref(pairs, 3, want, shared)
        combine(pairs.to(context.device), 3, got, shared.to(context.device))
        assert torch.equal(got.cpu(), want), f"combine differs from its reference in {_short(dtype)}"
    return {"bit_equal": True}


@piece("kernels")
def host_ffn(context: Context) -> dict:
    """The CPU's grouped FFN, in every dtype, with the best instruction set of this machine."""
    build_native()
    from apexk.kernels.cpu.ffn import HostFFN
    from apexk.kernels.cpu.reference import grouped_ffn_ref

    errors = {}
    with HostFFN() as host:
        for name, (tokens, topk, hidden, inter, experts, _) in LAYERS.items():
            for dtype in TOLERANCE:
                store = (torch.randn(experts, 3 * hidden * inter) / hidden**0.5).to(dtype)
                blocks = torch.tensor([block.data_ptr() for block in store])
                x, ids, weights = _tokens(tokens, topk, hidden, experts, dtype)
                chosen = sorted(set(ids.flatten().tolist()))
                want = torch.empty(ids.numel(), hidden, dtype=torch.float64)
                got = torch.full(want.shape, float("nan"))
                grouped_ffn_ref(x, blocks, ids, weights, chosen, want, intermediate=inter)
                host.run(x, blocks, ids, weights, chosen, got, intermediate=inter)
                errors[f"{name}, {_short(dtype)}"] = _compare(got, want, dtype)
        return {"isa": host.isa, "threads": host.threads, **errors}


@piece("kernels")
def timings(context: Context) -> dict:
    """Every benchmark case that runs on a GPU: median ms and percent of its measured roof."""
    if context.virtual:
        raise Skip("kernels are timed on a GPU only")
    from apexk.kernels.bench import run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        code = run.main(["--device", "cuda", "--budget", "0.3", "--jsonl", str(path)])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert code == 0, f"the benchmark runner ended with {code}"
    timed = [row for row in rows if "percent_of_roof" in row]
    return {row["name"]: f"{row['p50_ns'] / 1e6:.4f} ms, {row['percent_of_roof']:.1f} % of {row['roof']}" for row in timed}


def build_native() -> None:
    """Compile the native library of the source tree if it is not there."""
    from apexk.kernels.cpu import build, library

    if not library.PATH.is_file():
        try:
            build.build(library.PATH.parent)
        except RuntimeError as error:
            raise Skip(f"the native library is not built and cannot be: {error}") from error


def _ready(context: Context) -> None:
    if importlib.util.find_spec("triton") is None:
        raise Skip("triton is not installed")
    if context.virtual:
        assert os.environ.get("TRITON_INTERPRET") == "1", "set before Triton's first import, by --virtual"
        path = ROOT / "tests" / "triton_interpreter.py"
        spec = importlib.util.spec_from_file_location("triton_interpreter", path)
        repairs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(repairs)
        repairs.install()


def _layer(sizes, dtype):
    """x, w13, w2, ids, weights, slot_of on the CPU; slots that hold no expert are NaN."""
    tokens, topk, hidden, inter, experts, resident = sizes
    x, ids, weights = _tokens(tokens, topk, hidden, experts, dtype)
    w13 = (torch.randn(resident + 1, 2 * inter, hidden) / hidden**0.5).to(dtype)
    w2 = (torch.randn(resident + 1, hidden, inter) / inter**0.5).to(dtype)
    slots = torch.randperm(resident + 1)
    w13[slots[-1]], w2[slots[-1]] = float("nan"), float("nan")
    slot_of = torch.full((experts,), -1, dtype=torch.int32)
    slot_of[torch.randperm(experts)[:resident]] = slots[:resident].int()
    return x, w13, w2, ids, weights, slot_of


def _tokens(tokens, topk, hidden, experts, dtype):
    ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])
    return torch.randn(tokens, hidden).to(dtype), ids, torch.rand(tokens, topk)


def _compare(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    got = got.double().cpu()
    assert torch.equal(got.isnan(), want.isnan()), "other rows were written than those of the reference"
    scale = want.nan_to_num().abs().amax(-1, keepdim=True).clamp(min=1e-3)
    error = ((got - want).nan_to_num().abs() / scale).max().item()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e} in {_short(dtype)}, allowed {TOLERANCE[dtype]:.0e}"
    return error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
