"""Run benchmark cases: check against the reference, then time, then one JSON line each. `main` is `apexk kernels bench`.

A row (schema apexk.bench/1) holds op, provider, device, dtype, shape, p20/p50/p80, flops, bytes, the roof's name, value
and the percentage of it, the error of the check, and what `machine.py` knows; `command` repeats it.
"""

import argparse
import json
import os
import shlex
import sys

import torch

from . import machine
from .registry import DTYPE_NAMES, all_cases, select
from .roofs import bound_by, roofs_of
from .table import markdown, read_rows
from .timing import quantiles, times_ns

SCHEMA = "apexk.bench/1"
PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NV_COMPUTE_PROFILER_PERFWORKS_DIR")  # set in a process under nsys or ncu
DONE, FAILED, MISUSE, LACKING = 0, 1, 2, 3


def main(argv=None) -> int:
    args = _parser().parse_args(argv)
    if args.table:
        print(markdown(read_rows(args.table)), end="")
        return DONE
    try:
        cases = select(all_cases(), args.case)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISUSE
    if args.device:
        cases = [case for case in cases if case.device == args.device]
    if args.list:
        print("\n".join(case.name for case in cases))
        return DONE
    if not cases:
        print(f"none of these cases runs on {args.device}; --list shows them all", file=sys.stderr)
        return MISUSE
    here = [case for case in cases if case.device == "cpu" or torch.cuda.is_available()]
    missing = len(cases) - len(here)
    if missing:
        print(f"{missing} of {len(cases)} cases need a CUDA device, which this machine lacks; they are left out", file=sys.stderr)
    if not here:
        return LACKING
    if any(name in os.environ for name in PROFILERS) and not args.under_profiler:
        print("this process runs under a profiler, which changes times; say --under-profiler if that is meant", file=sys.stderr)
        return MISUSE
    rows, failed = [], []
    for device in sorted({case.device for case in here}):
        rows += [_roof_row(device, roof) for roof in roofs_of(device)]
    for case in here:
        row, wrong = measure(case, check=args.check, budget_s=args.budget)
        failed += [wrong] if wrong else []
        rows += [row] if row else []
        print(_line(row) if row else f"FAILED {case.name}: {wrong}", flush=True)
    if args.jsonl:
        with open(args.jsonl, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return FAILED if failed else DONE


def measure(case, *, check=True, budget_s=1.0):
    """(row, None), or (None, what was wrong) where the result differs from the reference: then nothing is timed."""
    call = case.make(case.device)
    error = None
    if check:
        call.run()
        error = call.error()
        if not error <= case.allowed_error:
            return None, f"relative error {error:.1e} against the reference, allowed {case.allowed_error:.0e}"
    times = quantiles(times_ns(call.run, case.device, budget_s))
    roof, least_ns = bound_by(case.device, case.dtype, call.flops, call.bytes, case.product)
    return {
        "schema": SCHEMA, "name": case.name, "op": case.op, "provider": case.provider, "dtype": DTYPE_NAMES[case.dtype],
        "shape": case.shape, **times, "flops": call.flops, "bytes": call.bytes, "roof": roof.name,
        "roof_value": roof.value, "roof_unit": roof.unit, "percent_of_roof": 100 * least_ns / times["p50_ns"],
        "error": error, **_where(case.device), "command": f"apexk kernels bench {shlex.quote(case.name)}",
    }, None  # fmt: skip


def _where(device) -> dict:
    return {**machine.device_facts(device), **machine.facts()}


def _roof_row(device, roof) -> dict:
    row = {"schema": SCHEMA, "name": f"roof/{roof.name}", "op": "roof", "value": roof.value, "unit": roof.unit, **_where(device)}
    print(f"roof {roof.name}: {roof.value:.1f} {roof.unit} on {row['device']}", file=sys.stderr)
    return row


def _line(row) -> str:
    spread = f"{row['p50_ns'] / 1e3:10.1f} us  ({row['p20_ns'] / 1e3:.1f} to {row['p80_ns'] / 1e3:.1f})"
    return f"{row['name']:72} {spread:38} {row['percent_of_roof']:5.1f} % of {row['roof']} ({row['roof_value']:.0f} {row['roof_unit']})"


def _parser():
    parser = argparse.ArgumentParser(prog="apexk kernels bench", description="Check and time the kernels against measured roofs.")
    parser.add_argument("case", nargs="*", help="names or patterns (* and ?); default all")
    parser.add_argument("--list", action="store_true", help="show the cases' names and stop")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only cases of this device")
    parser.add_argument("--jsonl", metavar="PATH", help="append the rows to this file")
    parser.add_argument("--table", metavar="PATH", help="show the rows of such a file as Markdown and stop")
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds a case (default 1)")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the reference first")
    parser.add_argument("--under-profiler", action="store_true", help="run although a profiler is attached")
    return parser
