"""The shell scripts of this folder from Python: `apexk kernels triton --case NAME --ncu` and `apexk profile`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def nsys(out: str | os.PathLike, command: Sequence[str], *, dry_run: bool = False) -> int:
    """Runs `command` under nsys_profile.sh; its exit code."""
    return _script("nsys_profile.sh", [*(["--dry-run"] if dry_run else []), str(out), *command])


def main(argv: Sequence[str] | None = None, *, device_of: Callable[[str], str]) -> int:
    """`device_of`: of a case by name; raises ValueError where there is none."""
    parser = argparse.ArgumentParser(prog="apexk kernels triton --ncu", description="One benchmark case under Nsight Compute.")
    parser.add_argument("--case", required=True, metavar="NAME", help="one case's name; apexk kernels bench --list shows them")
    parser.add_argument("--out", metavar="PATH", help="report without .ncu-rep (default ncu-NAME here)")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    options = parser.parse_args(argv)
    if device_of(options.case) != "cuda":
        raise ValueError(f"{options.case} runs on the CPU, where Nsight Compute sees nothing; wanted a case of a GPU")
    return _script("ncu_kernel.sh", [*(["--dry-run"] if options.dry_run else []), options.case, *([options.out] if options.out else [])])


def _script(name: str, arguments: Sequence[str]) -> int:
    sys.stdout.flush()
    return subprocess.run(["bash", str(HERE / name), *arguments], env=os.environ | {"PYTHON": sys.executable}).returncode
