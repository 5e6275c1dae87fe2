"""The gate of the CUDA kernels: they must compile for every target without spills and move weights 128 bits at a time.

`main` is the entry of `apexk kernels cuda --aot`. Exit code 3 where nvcc is missing: nothing was looked at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from apexk.arguments import Parser
from apexk.kernels.aot.compile import disassemble
from apexk.kernels.aot.sass import Counts, count
from apexk.kernels.aot.table import counted, table, targets_of
from apexk.kernels.aot.targets import occupancy
from apexk.outputs import out_file, write_json

from . import build
from .slots import THREADS, UNROLL

WARPS = {"slot_gather": THREADS // 32, "slot_ready": 1}
COLUMNS = ("kernel", "sm", "regs", "spill", "shared", "blocks", "loads", "stores", "local")


def failures(made: build.Compiled, counts: Counts) -> list[str]:
    """What is wrong with one cubin; empty when nothing is."""
    wrong = []
    if made.spill_bytes or counts.local:
        wrong.append(f"{made.spill_bytes} bytes spilled, {counts.local} instructions on local memory: lower UNROLL")
    if made.kernel == "slot_gather":
        for what, widths in (("reads", counts.loads), ("stores", counts.stores)):
            if widths[128] != UNROLL:
                wrong.append(f"{what} are {dict(widths)} (bits: number), wanted {UNROLL} of 128 bits a thread")
    if counts.atomics < 1:
        wrong.append("no atomic instruction: nothing raises the flag")
    return wrong


def row(made: build.Compiled, counts: Counts) -> tuple:
    blocks = occupancy(made.target, made.regs, made.shared_bytes, WARPS[made.kernel]).blocks
    return made.kernel, made.target, made.regs, made.spill_bytes, made.shared_bytes, blocks, counted(counts.loads), counted(counts.stores), counts.local


def main(argv=None) -> int:
    parser = Parser(prog="apexk kernels cuda --aot", description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", type=targets_of, default=",".join(map(str, build.TARGETS)), help="compute capabilities, 86 for 8.6 (%(default)s)")
    parser.add_argument("--json", type=out_file, metavar="PATH", help="write every figure here")
    args = parser.parse_args(argv)
    compiler = build.nvcc()
    if compiler is None:
        print("!!! NOT COVERED: the CUDA kernels; nvcc was not found (install the CUDA toolkit, or name its compiler in NVCC)", file=sys.stderr)
        return 3
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kernel in build.KERNELS:
            for target in args.targets:
                try:
                    made = build.compile_one(kernel, target, Path(folder))
                    counts, _ = count(disassemble(made.path.read_bytes()))
                except RuntimeError as error:
                    wrong.append(f"sm_{target} {kernel}: {error}")
                    continue
                rows.append(row(made, counts))
                wrong += [f"sm_{target} {kernel}: {text}" for text in failures(made, counts)]
    print(f"nvcc {build.version(compiler)}")
    print(table(COLUMNS, rows))
    print("\n".join(f"FAILED {text}" for text in wrong) + ("\n" if wrong else "") + f"{len(rows)} cubins, {len(wrong)} failures")
    if args.json:
        write_json(args.json, [dict(zip(COLUMNS, r, strict=True)) for r in rows])
    return 1 if wrong else 0
