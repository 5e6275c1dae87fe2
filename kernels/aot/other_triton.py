"""The gate under another Triton than the installed one, in an environment of its own that shares everything else.

A kernel that one version compiles well may spill under another, and machines differ in what they carry. The environment
holds that Triton alone and reads all other packages from the one that this process runs in.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PYTHON = Path("bin", "python")


def folder_of(version: str) -> Path:
    """Inside the environment of this process, so that it goes with it."""
    return Path(sys.prefix, "other-triton", version)


def gate_under(version: str, arguments) -> int:
    """Exit code of the gate under that Triton; 3 where it could not be installed."""
    folder = folder_of(version)
    wrong = prepare(version, folder)
    if wrong:
        print(f"!!! NOT COVERED: the gate under Triton {version}, which could not be installed: {wrong}", file=sys.stderr)
        return 3
    program = "import sys; from apexk.kernels.aot.gate import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    script = folder / "gate.py"  # a file, since worker processes import it again
    script.write_text(program, encoding="utf-8")
    return subprocess.run([folder / PYTHON, script, *arguments], env=environment()).returncode


def prepare(version: str, folder: Path) -> str:
    """Make the environment unless it stands; what went wrong, empty where nothing did."""
    if sys.prefix == sys.base_prefix:
        return "this Python is in no virtual environment that could hold it"
    done = folder / "ready"
    if done.is_file():
        return ""
    try:
        venv.create(folder, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", folder / PYTHON, "install", "-q", "--disable-pip-version-check"]
        ran = subprocess.run([*pip, "--no-deps", f"triton=={version}"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    # its own packages come first, ours after them; addsitedir also follows the .pth files of editable installs
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (own / "shared.pth").write_text(shared, encoding="utf-8")
    done.touch()
    return ""


def environment() -> dict:
    """Without what would let this process's own packages or the interpreter in."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "TRITON_INTERPRET")}
