"""Kernels against their float64 references on small layers: Triton's on the GPU or in the interpreter, the
CPU's on the host. Everything that must not be read is NaN."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import torch

from apexk.kernels.bench.poisoned import TOLERANCE, compare

from .environment import ROOT
from .pieces import Context, Skip, piece

VIRTUAL_CASES = 9  # of the matrix, where the interpreter takes a second for each
# Tokens, choices, hidden, intermediate, experts, resident: less than a tile, odd sizes with one token, every expert chosen.
LAYERS = {"small": (7, 3, 64, 48, 10, 4), "one token": (1, 2, 72, 40, 6, 6), "all chosen": (17, 8, 96, 80, 8, 5)}


@piece("kernels")
def grouped_ffn(context: Context) -> dict:
    """`moe_ffn` over the matrix that the test suite has, or as much of it as half of the time allows; a part when virtual."""
    _ready(context)
    from apexk.kernels.bench.matrix import CASES, check, name

    cases = CASES[: VIRTUAL_CASES if context.virtual else None]
    least_left = context.seconds_left() / 2
    errors, wrong = {}, []
    for case in cases:
        if context.seconds_left() < least_left:
            break
        try:
            errors[name(case)] = check(case, context.device)
        except AssertionError as error:
            errors[name(case)] = str(error)
            wrong.append(f"{name(case)}: {error}")
    assert not wrong, f"{len(wrong)} of {len(errors)} cases: " + "; ".join(wrong)
    worst = {_short(dtype): max([errors[name(c)] for c in cases[: len(errors)] if dtype in c], default="-") for dtype in TOLERANCE}
    return {"cases": len(errors), "left out for time": len(cases) - len(errors), **{f"largest error, {d}": e for d, e in worst.items()}}


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
                errors[f"{name}, {_short(dtype)}"] = compare(got, want, dtype)
        return {"isa": host.isa, "threads": host.threads, **errors}


@piece("kernels")
def timings(context: Context) -> dict:
    """Every benchmark case that runs on a GPU: median ms and percent of its measured roof."""
    if context.virtual:
        raise Skip("kernels are timed on a GPU only")
    from apexk.kernels.bench import run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        within = max(context.seconds_left(), 0.0)
        code = run.main(["--device", "cuda", "--budget", "0.3", "--within", str(min(within, 1e6)), "--json", str(path)])
        report = json.loads(path.read_text())
    assert code == 0, f"the benchmark runner ended with {code}: {'; '.join(report['failed'])}"
    timed = [row for row in report["rows"] if "percent_of_roof" in row]
    numbers = {row["name"]: f"{row['p50_ns'] / 1e6:.4f} ms, {row['percent_of_roof']:.1f} % of {row['roof']}" for row in timed}
    return {"cases": len(timed), "left out for time": report["left_out"], **numbers, "rows": report["rows"]}


def build_native() -> None:
    """Compile the native libraries of the source tree that are not there."""
    from apexk.device.native import build as transfer
    from apexk.kernels.cpu import build, library

    try:
        if not library.PATH.is_file():
            build.build(library.PATH.parent)
        if not (transfer.HERE / "_apexk_transfer.so").is_file() and (transfer.HERE / "src").is_dir():
            transfer.build("_apexk_transfer")
    except RuntimeError as error:
        raise Skip(f"a native library is not built and cannot be: {error}") from error


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


def _tokens(tokens, topk, hidden, experts, dtype):
    ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])
    return torch.randn(tokens, hidden).to(dtype), ids, torch.rand(tokens, topk)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
