"""Compiles the native libraries of the transfer layer, and their self-test. See `kernels/cpu/build.py`, whose compiler it uses.

Standard library only, so that `setup.py` can execute this file before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NVTX = ROOT / "profiling" / "native"  # ranges of native threads
CPU = ROOT / "kernels" / "cpu"  # the job queue's interface, and how its native code waits

LIBRARIES = {  # name -> source files
    "_apexk_transfer": ["channel", "hand_off", "transfer_api"],
    "_apexk_fake_cuda": ["fake_streams", "fake_api"],
}
SELFTEST = ["selftest", "selftest_channel", "selftest_churn", "selftest_hand_off"]
FLAGS = ["-std=c++20", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]


def _cpu_build():
    """`kernels/cpu/build.py` by its path: importing it through the package would need torch at build time."""
    spec = importlib.util.spec_from_file_location("apexk_cpu_build", CPU / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(name: str, out_dir: Path = HERE) -> Path:
    """`out_dir/<name>.so`, compiled if it is out of date."""
    sources = [HERE / "src" / f"{stem}.cpp" for stem in LIBRARIES[name]]
    return compile_(sources, out_dir / f"{name}.so", ["-O2", "-shared", f"-Wl,-soname,{name}.so"])


def build_selftest(out_dir: Path, flags: Sequence[str] = (), replaced: Mapping[str, Path] | None = None) -> Path:
    """`out_dir/selftest`: the layer, the fake runtime and the test in one program. `replaced`: other files for some stems."""
    files = {stem: HERE / "src" / f"{stem}.cpp" for stems in LIBRARIES.values() for stem in stems}
    files |= {stem: HERE / "tests" / f"{stem}.cpp" for stem in SELFTEST} | dict(replaced or {})
    out_dir.mkdir(parents=True, exist_ok=True)

    def one(item: tuple[str, Path]) -> Path:
        return compile_([item[1]], out_dir / f"{item[0]}.o", ["-O1", "-g", "-Wno-missing-field-initializers", *flags, "-c"])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        objects = list(workers.map(one, files.items()))
    return compile_(objects, out_dir / "selftest", ["-pthread", *flags])


def compile_(inputs: Sequence[Path], target: Path, flags: Sequence[str]) -> Path:
    """One compiler call, left out when `target` is newer than everything that it could be made from."""
    cpu = _cpu_build()
    headers = [path for folder in (HERE / "include", HERE / "src", HERE / "tests", NVTX, CPU / "include", CPU / "src") for path in folder.glob("*.h")]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in (Path(__file__), *inputs, *headers)):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{folder}" for folder in (HERE / "include", HERE / "src", HERE / "tests", NVTX, CPU / "include", CPU / "src")]
    cpu._call([*cpu.compiler(), *FLAGS, *includes, *inputs, *flags], target)
    return target


def sanitize(kinds: str) -> None:
    """Runs the self-test under e.g. `address,undefined` or `thread`."""
    flags = [f"-fsanitize={kinds}", "-fno-sanitize-recover=all"]
    selftest = build_selftest(ROOT / "build" / f"transfer-{kinds.replace(',', '-')}", flags)
    subprocess.run([selftest], check=True, env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the transfer layer beside this file.")
    parser.add_argument("--sanitize", metavar="KINDS", help="instead build and run the self-test, e.g. thread")
    arguments = parser.parse_args()
    if arguments.sanitize:
        sanitize(arguments.sanitize)
    else:
        for library in LIBRARIES:
            print(build(library))
