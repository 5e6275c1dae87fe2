"""`apexk policies`: what there is to choose from."""

from __future__ import annotations

import argparse

from apexk.cli import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    from apexk.policy.registry import POLICIES

    def yes(flag: bool) -> str:
        return "yes" if flag else "no"

    table = [["policy", "exact fetch", "speculative", "lossless", "source"]]
    table += [[p.name, yes(p.fetches), yes(p.speculates), yes(p.lossless), p.source] for p in POLICIES.values()]
    widths = [max(len(row[i]) for row in table) for i in range(5)]
    for row in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return DONE
