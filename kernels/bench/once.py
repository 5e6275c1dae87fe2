"""Run one benchmark case a few times between cudaProfilerStart and Stop, for a profiler; nothing is timed or compared.

    ncu --profile-from-start off ... python -m apexk.cli kernels once NAME
"""

import sys

import torch

from apexk.arguments import Parser, whole

from .registry import Case, all_cases, select


def one_case(name: str) -> Case:
    """ValueError where no case or more than one has this name."""
    found = select(all_cases(), [name])
    if len(found) > 1:
        raise ValueError(f"{name!r} means {len(found)} cases, wanted one: {', '.join(case.name for case in found[:6])} ...")
    return found[0]


def main(argv=None) -> int:
    parser = Parser(prog="apexk kernels once", description=__doc__.split("\n\n")[0])
    parser.add_argument("case", help="one case's name; apexk kernels bench --list shows them")
    parser.add_argument("--warmup", type=whole(0), default=3, metavar="N", help="executions outside of the profiled range (default 3)")
    parser.add_argument("--runs", type=whole(), default=1, metavar="N", help="executions inside it (default 1)")
    args = parser.parse_args(argv)
    try:
        case = one_case(args.case)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    on_gpu = case.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(f"{case.name} needs a CUDA device, which this machine lacks", file=sys.stderr)
        return 3
    call = case.make(case.device)
    for _ in range(args.warmup):
        call.run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    for _ in range(args.runs):
        call.run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{case.name}: {args.runs} executions after {args.warmup}")
    return 0
