"""`apexk kernels`: what the kernels look like and how fast they are; each part has its own `--help`."""

from __future__ import annotations

import argparse
import importlib

#: part -> (module with `main(argv) -> exit code`, what it does)
PARTS = {
    "bench": ("apexk.kernels.bench.run", "check, then time the kernels against measured roofs"),
    "aot": ("apexk.kernels.aot.gate", "compile the Triton kernels for named GPUs; registers, spills, shared memory, SASS counts"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = "; ".join(f"{name}: {text}" for name, (_, text) in PARTS.items())
    parser.add_argument("part", choices=PARTS, help=parts)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the part's own arguments; --help shows them")


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(PARTS[args.part][0]).main(args.rest)
