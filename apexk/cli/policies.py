"""`apexk policies`: what there is to choose from, and what each may do."""

from __future__ import annotations

import argparse

from apexk.cli import DONE
from apexk.outputs import out_file, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write the matrix here")


def run(args: argparse.Namespace) -> int:
    from apexk.policy.evict import RULES
    from apexk.policy.registry import POLICIES

    rows = [matrix_row(policy) for policy in POLICIES.values()]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    print(f"\neviction rules (`name(evict=RULE)`): {', '.join(RULES)}; belady in a simulation's reference rows")
    print("your own policy: --policy module:Class, or an entry point in the group apexk.policies; see docs/write_a_policy.md")
    if args.json:
        write_json(args.json, rows)
    return DONE


def matrix_row(policy) -> dict[str, str]:
    """What a policy class says of itself, in words."""
    moves = (policy.fetches and policy.keeps_fetched) or policy.speculates or policy.posts
    return {
        "policy": policy.name,
        "CPU": _yes(policy.uses_cpu),
        "exact fetch": "no" if not policy.fetches else "yes" if policy.keeps_fetched else "not kept",
        "speculative": "no" if not policy.speculates else "next layer" if policy.look_ahead == 1 else f"next {policy.look_ahead} layers",
        "after step": _yes(policy.posts),
        "victim": policy.evicts if moves else "none",
        "pool scope": ", ".join(policy.pool_scopes),
        "lossless": _yes(policy.lossless),
        "source": policy.source,
    }


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
