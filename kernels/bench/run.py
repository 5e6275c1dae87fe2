"""Run benchmark cases: check against the reference, then time, then one JSON line each. `main` is `apexk kernels bench`.

A row (schema apexk.bench/1) holds op, provider, device, dtype, shape, p20/p50/p80, flops, bytes, both by second, the
roof's name, value and the percentage of it, the error of the check, and what `machine.py` knows; `command` repeats it.
With `--against PROVIDER` the providers' repeats alternate and `ratio_vs` says how many times as long the others took; with
`--against REVISION` or `--baseline FILE` a row's `baseline` says how it compares, see `compare.py`.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import time

import torch

from apexk.arguments import Parser, wholes, words
from apexk.outputs import added_file, out_file, write_json

from . import compare, machine
from .against import PACKAGES, add_ratios, choose, competitors, is_ours
from .registry import DTYPE_NAMES, all_cases, select
from .roofs import Beside, bound_by, roofs_of
from .table import markdown, read_rows
from .timing import alternating_times_ns, quantiles

SCHEMA = "apexk.bench/1"
PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NV_COMPUTE_PROFILER_PERFWORKS_DIR")  # set in a process under nsys or ncu
DONE, FAILED, MISUSE, LACKING = 0, 1, 2, 3


def main(argv=None) -> int:
    args = _parser().parse_args(argv)
    if args.table:
        print(markdown(read_rows(args.table)), end="")
        return DONE
    try:
        cases = _asked_for(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISUSE
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
    try:
        kept = _baseline(args, here)
        with _other_revision(args, here) as other:
            return _measure_all(args, here, other, kept)
    except (compare.Incomparable, ValueError) as error:
        print(error, file=sys.stderr)
        return MISUSE if isinstance(error, ValueError) else FAILED


def _baseline(args, here) -> list:
    """Rows of `--baseline`; ValueError where none of them compares."""
    kept = compare.read_baseline(args.baseline) if args.baseline else []
    if args.baseline:
        compare.in_common({(case.name, _where(case.device)["device"]) for case in here}, kept, args.baseline)
    return kept


def _measure_all(args, here, other, kept) -> int:
    rows, failed = [], []
    before = other() if other else kept
    for device in sorted({case.device for case in here}):
        rows += [_roof_row(device, roof) for roof in roofs_of(device)]
    groups = competitors(here) if args.against and not other else [[case] for case in here]
    end, left_out = time.monotonic() + args.within, 0
    nothing_kept = not (args.json or args.jsonl or other or args.baseline)
    for group in groups:
        if nothing_kept and getattr(sys.stdout, "unheard", False):  # the reader has left
            return FAILED if failed else DONE
        if time.monotonic() > end:
            left_out += len(group)
            continue
        measured, wrong = measure(group, check=args.check, budget_s=args.budget)
        if args.against and not other:
            command = f"apexk kernels bench {_pattern(group)} --against {','.join(args.against)}"
            measured = [{**row, "command": command} for row in measured]
        failed += wrong
        rows += measured
        print("\n".join([*map(_line, measured), *(f"FAILED {text}" for text in wrong)]), flush=True)
    if left_out:
        print(f"{left_out} of {len(here)} cases are left out: --within {args.within:g} seconds have passed", file=sys.stderr)
    if other or args.baseline:
        baselines = [before, other()] if other else [before]
        regressed = compare.compare(rows, baselines, args.against[0] if other else args.baseline, args.threshold / 100)
        print("\n".join(_compared(row) for row in rows if "baseline" in row))
        failed += regressed
        print("\n".join(f"REGRESSED {text}" for text in regressed), end="\n" if regressed else "")
    if args.jsonl:
        with open(args.jsonl, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.json:
        write_json(args.json, {"schema": SCHEMA, "rows": rows, "failed": failed, "left_out": left_out})
    return FAILED if failed else DONE


def _asked_for(args) -> list:
    """ValueError where a word matches nothing."""
    cases = [case for case in select(all_cases(), args.case) if args.device in (None, case.device)]
    for name in ("tokens", "threads"):
        asked = getattr(args, name)
        there = {case.shape.get(name) for case in cases} - {None}
        if asked and not {*asked} <= there:
            raise ValueError(f"--{name}: no case has {sorted({*asked} - there)}; there are {', '.join(map(str, sorted(there)))}")
        cases = [case for case in cases if asked is None or case.shape.get(name) in asked]
    if args.baseline and not os.path.isfile(args.baseline):
        raise ValueError(f"--baseline: there is no file {args.baseline}; --jsonl or --json writes one")
    if args.against and _is_revision(args):
        return [case for case in cases if is_ours(case.provider)]
    if args.against:
        cases, missing = choose(cases, args.against)
        for package in missing:
            print(f"--against: {package} cannot be imported here; it is left out", file=sys.stderr)
    return cases


def _is_revision(args) -> bool:
    """A provider's name counts before a branch's."""
    try:
        choose(all_cases(), args.against)
        return False
    except ValueError:
        return len(args.against) == 1 and compare.commit_of(*args.against) is not None


@contextlib.contextmanager
def _other_revision(args, here):
    """A function that measures these cases at the revision of `--against`, None where that is no revision."""
    if not args.against or not _is_revision(args):
        yield None
        return

    def measured():
        _say(f"measuring {len(names)} cases at {args.against[0]}")
        return compare.rows_of(tree, names, args.budget)

    with compare.checkout(compare.commit_of(*args.against), _say) as tree:
        _say(f"asking {args.against[0]} which cases it has")
        names = compare.names_of(tree, [case.name for case in here], *args.against)
        yield measured


def _say(text) -> None:
    print(f"bench: {text} ...", file=sys.stderr, flush=True)


def measure(group, *, check=True, budget_s=1.0):
    """(rows, what was wrong) of cases that compute the same; one that differs from the reference is not timed."""
    calls, wrong = [], []
    for case in group:
        try:
            call, error = _checked(case, check)
        except Exception as raised:  # noqa: BLE001 - another project's function may have changed: that fails nothing of ours
            if case.provider not in PACKAGES:
                raise
            print(f"{case.name} is left out: {type(raised).__name__}: {raised}", file=sys.stderr)
            continue
        if error is not None and not error <= case.allowed_error:
            wrong.append(f"{case.name}: relative error {error:.1e} against the reference, allowed {case.allowed_error:.0e}")
            continue
        calls.append((case, call, error))
    if not calls:
        return [], wrong
    usual = torch.get_num_threads()
    beside = Beside(group[0].shape.get("threads")) if group[0].device == "cpu" else None
    limits = beside.calls if beside else []
    try:
        times = alternating_times_ns([*[call.run for _, call, _ in calls], *limits], group[0].device, budget_s)
    finally:
        torch.set_num_threads(usual)
    roofs = beside.roofs(times[len(calls) :]) if beside else None
    rows = [_row(case, call, error, quantiles(taken), roofs) for (case, call, error), taken in zip(calls, times[: len(calls)], strict=True)]
    add_ratios(rows)
    return rows, wrong


def _checked(case, check):
    """(call, error of one execution or None)."""
    call = case.make(case.device)
    if not check:
        return call, None
    call.run()
    return call, call.error()


def _row(case, call, error, times, roofs) -> dict:
    roof, least_ns = bound_by(case.device, case.dtype, call.flops, call.bytes, case.product, roofs)
    return {
        "schema": SCHEMA, "name": case.name, "op": case.op, "provider": case.provider, "dtype": DTYPE_NAMES[case.dtype],
        "shape": case.shape, "tokens": case.shape.get("tokens"), "threads": case.shape.get("threads"), "isa": case.isa,
        **times, "flops": call.flops, "bytes": call.bytes, "gb_per_s": call.bytes / times["p50_ns"],
        "gflop_per_s": call.flops / times["p50_ns"], "roof": roof.name, "roof_value": roof.value, "roof_unit": roof.unit,
        "percent_of_roof": 100 * least_ns / times["p50_ns"], "error": error, **_where(case.device),
        "command": f"apexk kernels bench {shlex.quote(case.name)}",
    }  # fmt: skip


def _pattern(group) -> str:
    """Matches the names of a group, which differ in the provider."""
    op, _, *rest = group[0].name.split("/")
    return shlex.quote("/".join([op, "*", *rest]))


def _where(device) -> dict:
    return {**machine.device_facts(device), **machine.facts()}


def _roof_row(device, roof) -> dict:
    row = {"schema": SCHEMA, "name": f"roof/{roof.name}", "op": "roof", "value": roof.value, "unit": roof.unit, **_where(device)}
    shown = "as the run begins; a row names what it was in its own turns" if device == "cpu" else ""
    print(f"roof {roof.name}: {roof.value:.1f} {roof.unit} on {row['device']}{shown and ', '}{shown}", file=sys.stderr)
    return row


def _line(row) -> str:
    spread = f"{row['p50_ns'] / 1e3:10.1f} us  ({row['p20_ns'] / 1e3:.1f} to {row['p80_ns'] / 1e3:.1f})"
    text = f"{row['name']:72} {spread:38} {row['percent_of_roof']:5.1f} % of {row['roof']} ({row['roof_value']:.0f} {row['roof_unit']})"
    return "  ".join([text, *(f"{ratio:.2f}x {name}" for name, ratio in row["ratio_vs"].items())])


def _compared(row) -> str:
    base = row["baseline"]
    return f"{row['name']:72} {row['p50_ns'] / 1e3:10.1f} us, {base['ratio']:.3f} times {base['p50_ns'] / 1e3:.1f} us of {base['source']}"


def _parser():
    parser = Parser(prog="apexk kernels bench", description="Check and time the kernels against measured roofs.")
    parser.add_argument("case", nargs="*", help="names or patterns (* and ?); default all")
    parser.add_argument("--list", action="store_true", help="show the cases' names and stop")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only cases of this device")
    parser.add_argument("--tokens", type=wholes(), metavar="N,N", help="only cases of so many tokens")
    parser.add_argument("--threads", type=wholes(), metavar="N,N", help="only cases of so many threads")
    parser.add_argument("--against", type=words, metavar="NAME,NAME|REV", help="of the others only these providers, in turns with ours, gives ratio_vs; or a git revision, run from a worktree")
    parser.add_argument("--baseline", metavar="PATH", help="compare with the rows of this file")
    parser.add_argument("--threshold", type=float, default=10.0, metavar="PERCENT", help="slower than the baseline by more than this fails (default 10)")
    parser.add_argument("--json", type=out_file, metavar="PATH", help="write the rows here as one document")
    parser.add_argument("--jsonl", type=added_file, metavar="PATH", help="append the rows to this file")
    parser.add_argument("--table", metavar="PATH", help="show the rows of such a file as Markdown and stop")
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds a case (default 1)")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="start no case after so many seconds")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the reference first")
    parser.add_argument("--under-profiler", action="store_true", help="run although a profiler is attached")
    return parser
