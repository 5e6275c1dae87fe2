"""`apexk report`: what a timeline or a profile says, layer by layer."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from apexk.profiling.report import add_arguments

    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from apexk.profiling.report import run

    return run(args)
