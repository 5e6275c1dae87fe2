"""Compiles the CUDA kernels ahead of time with nvcc, one cubin a kernel and target. Needs no GPU. Standard library only."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = ("slot_gather", "slot_ready")
TARGETS = (80, 86, 89, 90, 100, 120)
CUBINS = HERE / "cubin"


@dataclass(frozen=True)
class Compiled:
    """One cubin, and what the assembler said of it."""

    kernel: str
    target: int
    path: Path
    regs: int
    spill_bytes: int  # stored and loaded
    shared_bytes: int


def source(kernel: str) -> Path:
    return HERE / f"{kernel}.cu"


def cubin(kernel: str, target: int, folder: Path = CUBINS) -> Path:
    return folder / f"{kernel}.sm_{target}.cubin"


def nvcc() -> str | None:
    """The CUDA compiler: `NVCC`, else what PATH has; None where there is none."""
    return shutil.which(os.environ.get("NVCC") or "nvcc")


def version(compiler: str) -> str:
    found = re.search(r"release ([\d.]+)", subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    return found.group(1) if found else "?"


def compile_one(kernel: str, target: int, folder: Path = CUBINS) -> Compiled:
    """Raises RuntimeError with the compiler's words where there is none or it refuses."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found: install the CUDA toolkit, or name its compiler in NVCC")
    folder.mkdir(parents=True, exist_ok=True)
    path = cubin(kernel, target, folder)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # renamed at the end: never half written
    flags = ["-cubin", f"-arch=sm_{target}", "-O3", "-std=c++17", "-lineinfo", "-Xptxas", "-v"]
    done = subprocess.run([compiler, *flags, "-o", unfinished, source(kernel)], capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"nvcc refused {kernel} for sm_{target}: {log[-2000:]}")
    os.replace(unfinished, path)
    spills = sum(_number(rf"(\d+) bytes spill {way}", log) for way in ("stores", "loads"))
    return Compiled(kernel, target, path, _number(r"Used (\d+) registers", log), spills, _number(r"(\d+) bytes smem", log))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels into the folder beside this file.")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="compute capabilities, 90 for 9.0 (%(default)s)")
    for wanted in parser.parse_args().targets.split(","):
        for name in KERNELS:
            print(compile_one(name, int(wanted)).path)
