"""Compiles the native forms of a decision and of utilities. See `kernels/cpu/build.py`, whose compiler and flags it uses.

Standard library only, so that `setup.py` can execute this file before anything is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU = HERE.parents[2] / "kernels" / "cpu"
LIBRARY = "_apexk_policy"


def build(name: str = LIBRARY, out_dir: Path = HERE, flags: Sequence[str] = ()) -> Path:
    """`out_dir/<name>.so`, compiled if it is out of date."""
    spec = importlib.util.spec_from_file_location("apexk_cpu_build", CPU / "build.py")
    cpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cpu)
    sources, target = sorted((HERE / "src").glob("*.cpp")), out_dir / f"{name}.so"
    if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in (*sources, Path(__file__))):
        target.parent.mkdir(parents=True, exist_ok=True)
        cpu._call([*cpu.compiler(), *cpu.COMMON_FLAGS, "-shared", f"-Wl,-soname,{name}.so", *flags, *sources], target)
    return target


if __name__ == "__main__":
    print(build())
