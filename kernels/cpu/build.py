"""Compiles the native library: one compiler call for each source file, each with the flags of its instruction set.

Standard library only, so that `setup.py` can execute this file before anything is installed. Files whose name ends in an
instruction set get its flags and everything else is portable code, so one library runs on any x86-64 machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "_apexk_cpu.so"

# No contraction: the same source expression must round the same way in every file, with and without FMA.
COMMON_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
PORTABLE = ["api", "cpuid", "dispatch", "ffn_scalar", "job", "machine", "plan", "pool"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 warns about the undefined operands inside its own AVX-512 intrinsics.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512", "-Wno-uninitialized",
          "-Wno-maybe-uninitialized"]
X86 = {
    "ffn_avx2": AVX2,
    "ffn_avx512": AVX512,
    "ffn_avx512_wide": AVX512,
    "ffn_avx512_bf16": [*AVX512, "-mavx512bf16"],
    "ffn_amx": [*AVX512, "-mamx-tile", "-mamx-bf16"],
}
# 64-byte vectors of the compiler's own in place of AVX-512, and functions in place of tiles: runs wherever AVX2 does.
EMULATED = [*AVX2, "-Wno-psabi", "-O1"]


def sources(emulate: bool = False) -> dict[str, list[str]]:
    """Stem of each source file and its extra flags, for this machine's architecture."""
    units: dict[str, list[str]] = {stem: [] for stem in PORTABLE}
    if platform.machine() in ("x86_64", "AMD64"):
        units.update(dict.fromkeys(X86, EMULATED) if emulate else X86)
    if emulate:
        units = {stem: [*flags, "-DAPEXK_EMULATE"] for stem, flags in units.items()}
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
    out_dir: Path,
    build_dir: Path | None = None,
    cxx: str | None = None,
    *,
    emulate: bool = False,
    extra_flags: Sequence[str] = (),
) -> Path:
    """Compiles what is out of date and links `out_dir/_apexk_cpu.so`; returns its path.

    Objects are kept in `build_dir` (default: `build/cpu` of the checkout). For tests, with a `build_dir` of their own:
    `emulate` makes every instruction set run wherever AVX2 does, slowly; `extra_flags` go to every call.
    """
    objects_dir = build_dir or HERE.parents[1] / "build" / "cpu"
    objects_dir.mkdir(parents=True, exist_ok=True)
    out_dir.mkdir(parents=True, exist_ok=True)

    def one(unit: tuple[str, list[str]]) -> Path:
        return compile_one(unit[0], [*unit[1], *extra_flags], objects_dir, cxx)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        objects = list(workers.map(one, sources(emulate).items()))
    return link(objects, out_dir, cxx, extra_flags)


def compile_one(
    stem: str, flags: Sequence[str], objects_dir: Path, cxx: str | None = None, source_dir: Path = HERE
) -> Path:
    """The object of one source file; kept when it is newer than everything it was made from."""
    source, target = source_dir / "src" / f"{stem}.cpp", objects_dir / f"{stem}.o"
    headers = [path for folder in ("include", "src", "tests") for path in (source_dir / folder).glob("*.h")]
    newest = max(path.stat().st_mtime for path in (Path(__file__), source, *headers))
    if not target.exists() or target.stat().st_mtime < newest:
        _call([*compiler(cxx), *COMMON_FLAGS, *flags, f"-I{source_dir / 'include'}", "-c", source], target)
    return target


def link(objects: list[Path], out_dir: Path, cxx: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    library = out_dir / LIBRARY
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        _call([*compiler(cxx), "-shared", "-pthread", f"-Wl,-soname,{LIBRARY}", *extra_flags, *objects], library)
    return library


def build_test(stem: str, library: Path, cxx: str | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """`tests/<stem>.cpp` as a program beside `library`, whose objects are there too.

    The self-test uses the library: a copy of it the one beside the copy. Others are linked with the objects.
    """
    target, source = library.with_name(stem), HERE / "tests" / f"{stem}.cpp"
    parts = [library] if stem == "selftest" else [library.with_name(f"{unit}.o") for unit in sources()]
    if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in (source, *parts, Path(__file__))):
        flags = ["-O2", "-std=c++20", "-pthread", "-Wall", "-Wextra", *extra_flags, f"-I{HERE / 'include'}"]
        _call([*compiler(cxx), *flags, source, *parts, "-Wl,-rpath,$ORIGIN"], target)
    return target


def sanitize(kinds: str) -> None:
    """Runs the native tests, all instruction sets emulated, under e.g. `address,undefined` or `thread`."""
    out_dir = HERE.parents[1] / "build" / f"cpu-{kinds.replace(',', '-')}"
    flags = [f"-fsanitize={kinds}", "-fno-sanitize-recover=all", "-g"]
    library = build(out_dir, out_dir, emulate=True, extra_flags=flags)
    for stem in ("selftest", "nodes"):
        subprocess.run([build_test(stem, library, extra_flags=flags)], check=True)


def _call(arguments: list[str | Path], target: Path) -> None:
    """Runs the compiler into a file beside `target`, then renames: a library in use is never half written."""
    print(f"making {target.name}", file=sys.stderr, flush=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run([*map(str, arguments), "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {target.name} failed:\n{shlex.join(done.args)}\n{done.stderr}")
    os.replace(unfinished, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the CPU kernels beside this file.")
    parser.add_argument("--sanitize", metavar="KINDS", help="instead build and run the native tests, e.g. address,undefined")
    arguments = parser.parse_args()
    if arguments.sanitize:
        sanitize(arguments.sanitize)
    else:
        print(build(HERE))
