"""Compiles the native library: one compiler call for each source file, each with the flags of its instruction set.

Standard library only, so that `setup.py` can execute this file before anything is installed. Files whose name ends in an
instruction set get its flags and everything else is portable code, so one library runs on any x86-64 machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "_apexk_cpu.so"

# No contraction: the same source expression must round the same way in every file, with and without FMA.
COMMON_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
PORTABLE = ["api", "cpuid", "dispatch", "ffn_scalar", "job", "plan", "pool", "threads"]
X86 = {
    "ffn_avx2": ["-mavx2", "-mfma"],
    "ffn_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
}


def sources() -> dict[str, list[str]]:
    """Stem of each source file and its extra flags, for this machine's architecture."""
    units: dict[str, list[str]] = {stem: [] for stem in PORTABLE}
    if platform.machine() in ("x86_64", "AMD64"):
        units.update(X86)
    return units


def compiler(cxx: str | None = None) -> list[str]:
    """The C++ compiler as a command, or an error that says how to get one."""
    command = shlex.split(cxx or os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise RuntimeError(
            f"C++ compiler {command[0]!r} not found: install one (Debian, Ubuntu: apt-get install g++) or name one in CXX"
        )
    return command


def build(
    out_dir: Path, build_dir: Path | None = None, cxx: str | None = None, extra_flags: list[str] | None = None
) -> Path:
    """Compiles what is out of date and links `out_dir/_apexk_cpu.so`; returns its path.

    Objects are kept in `build_dir` (default: `build/cpu` of the checkout). `extra_flags` go to every call, e.g.
    `["-fsanitize=thread"]`; use a `build_dir` of its own for them.
    """
    command = compiler(cxx)
    objects_dir = build_dir or HERE.parents[1] / "build" / "cpu"
    objects_dir.mkdir(parents=True, exist_ok=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    shared = [Path(__file__), *HERE.glob("include/*.h"), *HERE.glob("src/*.h")]
    newest_shared = max(path.stat().st_mtime for path in shared)

    def compile_one(unit: tuple[str, list[str]]) -> Path:
        stem, flags = unit
        source, target = HERE / "src" / f"{stem}.cpp", objects_dir / f"{stem}.o"
        if target.exists() and target.stat().st_mtime > max(newest_shared, source.stat().st_mtime):
            return target
        _call([*command, *COMMON_FLAGS, *flags, *(extra_flags or []), f"-I{HERE / 'include'}", "-c", source], target)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        objects = list(workers.map(compile_one, sources().items()))
    library = out_dir / LIBRARY
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        _call([*command, "-shared", "-pthread", *(extra_flags or []), *objects], library)
    return library


def _call(arguments: list[str | Path], target: Path) -> None:
    """Runs the compiler into a file beside `target`, then renames: a library in use is never half written."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run([*map(str, arguments), "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {target.name} failed:\n{shlex.join(done.args)}\n{done.stderr}")
    os.replace(unfinished, target)


if __name__ == "__main__":
    print(build(HERE))
