"""Command line of the suite. Exit code: 0 all well, 1 a piece failed, 2 misuse, 3 the machine lacks something."""

from __future__ import annotations

import importlib.util
import os
import sys
import time

from apexk.arguments import Parser
from apexk.outputs import out_file

from .pieces import PARTS, PIECES, Context, run

BUDGET_S = {"kernels": 500, "transfer": 300, "engine": 480, "e2e": 480}  # what a part's own clock allows: it ends within nine minutes


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="profiling.gpu_suite", description="Checks and first timings on a GPU machine.")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--virtual", action="store_true", help="without a GPU: Triton's interpreter and a modelled clock")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of modelled times (%(default)s)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="write the results here, and as .md beside it (default on a GPU: profiling/results/DATE-GPU-PART.json)")
    options = parser.parse_args(arguments)
    if options.json and options.json.suffix == ".md":
        raise ValueError(f"--json is {options.json}: the page beside it would be written over it")

    if importlib.util.find_spec("torch") is None:
        return _lacking("torch is not installed for this Python")
    if options.virtual:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel file is imported
    import torch

    if not options.virtual and not torch.cuda.is_available():
        return _lacking("no CUDA device was found; --virtual runs what can run without one")

    from . import report
    from .environment import environment

    about = environment()
    _say_environment(about)
    torch.manual_seed(0)
    results, part, context = [], None, None
    for piece in _pieces(options.part):
        if piece.part != part:  # each part has its own clock, also among all
            part = piece.part
            context = Context(options.virtual, "cpu" if options.virtual else "cuda", options.hardware, time.monotonic() + BUDGET_S[part])
        print(f"running {piece.part}/{piece.name} ...", file=sys.stderr, flush=True)
        result = run(piece, context)
        _say(result)
        results.append(result)
    counts = {status: sum(r["status"] == status for r in results) for status in ("ok", "failed", "skipped")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    path = options.json or (report.default_path(about["gpu"]["name"], options.part) if not options.virtual else None)
    if path:
        command = f"python -m profiling.gpu_suite --part {options.part}{' --virtual' if options.virtual else ''}"
        report.write({"schema": "apexk.gpu-suite/1", "virtual": options.virtual, "command": command, "environment": about, "results": results}, path)
        print(f"results: {path} and {path.with_suffix('.md').name}")
    return 1 if counts["failed"] else 0


def _pieces(part: str):
    """The pieces asked for; their modules import torch, so they are loaded only now."""
    from . import part_e2e, part_engine, part_kernels, part_transfer  # noqa: F401

    return sorted((p for p in PIECES if part in (p.part, "all")), key=lambda p: PARTS.index(p.part))


def _say_environment(about: dict) -> None:
    gpu = about["gpu"]
    print(f"GPU    {gpu['name'] + ', ' + str(gpu['memory_gib']) + ' GiB' if gpu else 'none'}")
    print(f"CPU    {about['cpu']}, {about['processors']} processors, {about['memory_gib']} GiB")
    print("with   " + ", ".join(f"{name} {found or '-'}" for name, found in {"Python": about["python"], **about["packages"]}.items()))
    print(f"commit {about['commit'] or '?'}{', changed' if about['dirty'] else ''}", flush=True)


def _say(result: dict) -> None:
    print(f"{result['status']:<8}{result['part']}/{result['name']}  {result['seconds']:.1f} s  {result['message']}")
    from .report import number

    for name, value in result["numbers"].items():
        if isinstance(value, dict):
            for one, figures in value.items():
                print(f"        {one:<20} " + ", ".join(f"{what} {number(figure)}" for what, figure in figures.items()))
        else:
            print(f"        {name:<30} {number(value)}")
    if "traceback" in result:
        print(result["traceback"], file=sys.stderr)
    sys.stdout.flush()


def _lacking(what: str) -> int:
    print(what, file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
