"""Rows against a baseline: a file of rows kept from another day, or another commit, run from a worktree of its own.

The other commit runs before and after ours, and the mean of its two medians counts, so that a machine that warms up or
slows down meets both. A case has regressed where its median is more than the threshold above the baseline's and the middle
three fifths of the two do not meet: one slow repeat is no regression.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from .table import read_rows


class Incomparable(Exception):
    """The other commit could not be checked out, built or run; the message says which."""


ROOT = Path(__file__).resolve().parents[2]
FOLDER = "apexk-against-"  # begins the name of a folder with a worktree
LOCK = "in-use"  # a file in it that is locked as long as the run that made it lives


def commit_of(revision: str) -> str | None:
    """Full name of a git revision of this checkout, None where there is none."""
    try:
        done = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def checkout(commit: str, say: Callable[[str], None]):
    """A worktree of `commit` with its native library built; removed at the end, as are those that killed runs have left. `say` gets a line for each long step."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, open(Path(folder) / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tree = Path(folder) / "tree"
        try:
            say(f"checking out {commit[:10]} into a worktree")
            _run(["git", "worktree", "add", "--detach", str(tree), commit], ROOT)
            if (tree / "kernels" / "cpu" / "build.py").is_file():
                say(f"building the CPU kernels of {commit[:10]}")
                _run([sys.executable, "kernels/cpu/build.py"], tree)
            yield tree
        finally:
            _remove(tree)


def _remove_left() -> None:
    """Removes the worktrees of this checkout whose runs are no more."""
    listed = _run(["git", "worktree", "list", "--porcelain"], ROOT).splitlines()
    for tree in (Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")):
        if tree.parent.name.startswith(FOLDER) and not _in_use(tree.parent):
            _remove(tree)
            shutil.rmtree(tree.parent, ignore_errors=True)


def _in_use(folder: Path) -> bool:
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def _remove(tree: Path) -> None:
    """The folder first: what an interrupted `git worktree add` has left is no worktree that git removes."""
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, capture_output=True)


def names_of(tree: Path, names: list[str], source: str) -> list[str]:
    """Those of `names` that the tree's registry has. ValueError where it has none."""
    listed = _bench(tree, "--list").split("\n")
    there = [name for name in names if name in listed]
    if not there:
        raise ValueError(f"{source} has none of these cases: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")
    return there


def rows_of(tree: Path, names: list[str], budget_s: float) -> list[dict]:
    """Benchmark rows of cases that the tree's registry has, measured by the tree's own code."""
    path = tree / "rows.json"
    _bench(tree, *names, "--budget", str(budget_s), "--json", str(path))
    return [row for row in json.loads(path.read_text())["rows"] if row["op"] != "roof"]


def _bench(tree: Path, *words: str) -> str:
    return _run([sys.executable, "-m", "apexk.cli", "kernels", "bench", *words], tree, os.environ | {"PYTHONPATH": str(tree)})


def read_baseline(path) -> list[dict]:
    """Rows of a file that `--json` or `--jsonl` wrote. ValueError for any other file."""
    return [row for row in read_rows(path) if row["op"] != "roof"]


def in_common(asked: set[tuple[str, str]], baseline: list[dict], source: str) -> None:
    """ValueError where the rows of `baseline` hold none of the cases that are asked for, each a name and a device."""
    there = {(row["name"], row["device"]) for row in baseline}
    if not asked & there:
        devices = ", ".join(sorted({device for _, device in there})) or "no device"
        raise ValueError(f"{source} has none of these cases on this device; it has {len(there)} cases on {devices}")


def compare(rows: list[dict], baselines: list[list[dict]], source: str, threshold: float) -> list[str]:
    """Gives each row that a baseline has on the same device a `baseline`: where from, its median, ours over it, whether it has
    regressed by more than `threshold` (0.1: a tenth). Returns a sentence for each that has."""
    known: dict[tuple, list[dict]] = {}
    for row in (row for rows_there in baselines for row in rows_there):
        known.setdefault((row["name"], row["device"]), []).append(row)
    regressed = []
    for row in (row for row in rows if (row["name"], row.get("device")) in known):
        there = known[row["name"], row["device"]]
        base, slowest = (sum(r[q] for r in there) / len(there) for q in ("p50_ns", "p80_ns"))
        ratio = row["p50_ns"] / base
        worse = ratio > 1 + threshold and row["p20_ns"] > slowest
        row["baseline"] = {"source": source, "p50_ns": base, "ratio": ratio, "regressed": worse}
        if worse:
            regressed.append(f"{row['name']}: {row['p50_ns'] / 1e3:.1f} us, {ratio:.2f} times the {base / 1e3:.1f} us of {source}")
    return regressed


def _run(command, cwd, env=None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise Incomparable(f"{' '.join(command)} in {cwd} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
