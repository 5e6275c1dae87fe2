"""How much slower the CPU FFN gets while other processes compute. `main` is `apexk kernels cpu --busy`.

With `others` busy processes beside n threads on N processors each thread has a share of N / (n + others) of one. Calls
are timed before, during and after; a ratio far above what that share costs would say that threads wait for each other
in a loop, or that the end of a call waits for one thread that does not run.
"""

import contextlib
import os
import subprocess
import sys
import time

from apexk.arguments import Parser, positive, whole
from apexk.outputs import out_file, write_json

from . import machine
from .cases_cpu_ffn import cases
from .timing import quantiles


@contextlib.contextmanager
def busy_processes(count):
    """So many processes that compute without end."""
    # not after this one is gone; a group of their own, since a terminal's Ctrl-C is for this process alone, but no session: Linux may share
    # the processors out by session (sched_autogroup), and then all threads of this process together get what one busy process gets
    code = f"import os\nos.setpgrp()\nwhile os.getppid() == {os.getpid()}: sum(range(1000))"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def times_for(call, seconds) -> dict:
    taken, end = [], time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        taken.append(float(time.perf_counter_ns() - start))
    return {**quantiles(taken), "calls": len(taken), "most_ns": max(taken)}


def main(argv=None) -> int:
    parser = Parser(prog="apexk kernels cpu --busy", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=whole(), default=4)
    parser.add_argument("--others", type=whole(), default=2, help="busy processes (default 2)")
    parser.add_argument("--seconds", type=positive, default=5.0, help="of each of the three parts (default 5)")
    parser.add_argument("--json", type=out_file, metavar="PATH", help="write the figures here")
    args = parser.parse_args(argv)
    ours = [c for c in cases() if c.shape["tokens"] == args.tokens and c.isa]
    if not ours:
        print(f"no case has {args.tokens} tokens; there are {', '.join(map(str, sorted({c.shape['tokens'] for c in cases()})))}", file=sys.stderr)
        return 2
    case = max((c for c in ours if c.shape["layer"] == ours[0].shape["layer"]), key=lambda c: c.shape["threads"])
    call, processors = case.make("cpu").run, len(os.sched_getaffinity(0))
    call()
    before = times_for(call, args.seconds)
    with busy_processes(args.others):
        time.sleep(0.5)
        during = times_for(call, args.seconds)
    after = times_for(call, args.seconds)
    ratio = during["p50_ns"] / ((before["p50_ns"] + after["p50_ns"]) / 2)
    due = max(1.0, (case.shape["threads"] + args.others) / processors)
    for name, part in (("before", before), ("during", during), ("after", after)):
        print(f"{name:7} p50 {part['p50_ns'] / 1e6:8.2f} ms  p80 {part['p80_ns'] / 1e6:8.2f}  most {part['most_ns'] / 1e6:8.2f}  {part['calls']} calls")
    print(f"{case.name}: {ratio:.2f}x as long beside {args.others} busy processes; the lost share alone makes {due:.2f}x")
    if args.json:
        row = {"name": case.name, "others": args.others, "before": before, "during": during, "after": after, "ratio": ratio, "due": due,
               "command": f"apexk kernels cpu --busy --tokens {args.tokens} --others {args.others} --seconds {args.seconds:g}",
               **machine.facts()}  # fmt: skip
        write_json(args.json, row)
    return 0
