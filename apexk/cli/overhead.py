"""`apexk overhead`: what deciding, launching, handing rows to the CPU and setting transfers up costs on this host."""

from __future__ import annotations

import argparse

from apexk.arguments import whole, words
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.outputs import out_file, write_json
from apexk.policy import registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", type=words, default="apex", help="comma-separated names (default: apex)")
    parser.add_argument("--repeats", type=whole(4), default=300, help="samples of each figure (default: 300)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    for policy in args.policy:
        registry.check(policy)

    from apexk.overhead.measure import rows

    found = list(rows(args.policy, args.repeats))
    head = ["what", "policy", "experts", "tokens", "median us", "goal us", "yardsticks"]
    print(table([head] + [[r.what, *(str(v or "") for v in (r.policy, r.experts, r.tokens)), f"{r.us:.1f}", str(r.goal_us or ""), f"{r.yardsticks:.2f}"] for r in found]))
    print("yardstick: 1,000 look-ups in a dictionary, same run. decide, check, launch, layer: processor time of the model's thread, without kernel launches,")
    print("on a fake CUDA runtime. the rest: wall time through the real native channel, hand-off and workers there. Nothing here was measured on a GPU.")
    if args.json:
        write_json(args.json, {"schema": "apexk.overhead/1", "rows": [r.as_dict() for r in found]})
    return DONE
