"""`apexk report`: what a timeline says, layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("timeline", type=Path, help="a timeline.jsonl")
    parser.add_argument("--phase", choices=("prefill", "decode"), help="default: both")
    parser.add_argument("--skip", type=int, default=0, metavar="STEPS", help="leave out the first STEPS of each phase")
    parser.add_argument("--partial", action="store_true", help="the file of a run that was killed")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw a warm decode step here")


def run(args: argparse.Namespace) -> int:
    from apexk.profiling import report

    argv = [str(args.timeline), "--skip", str(args.skip)]
    argv += ["--phase", args.phase] if args.phase else []
    argv += ["--partial"] if args.partial else []
    argv += ["--json", str(args.json)] if args.json else []
    code = report.main(argv)
    if code == 0 and args.plot:
        from apexk.profiling.plot import layer_timeline

        layer_timeline(args.timeline, args.plot)
    return code
