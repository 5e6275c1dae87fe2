"""Rows against a baseline: a file of rows kept from another day, or another commit, run from a worktree of its own.

The other commit runs before and after ours, and the mean of its two medians counts, so that a machine that warms up or
slows down meets both. A case has regressed where its median is more than the threshold above the baseline's and the middle
three fifths of the two do not meet: one slow repeat is no regression.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from .table import read_rows


class Incomparable(Exception):
    """The other side could not be run or read, or has nothing in common; the message says which."""


ROOT = Path(__file__).resolve().parents[2]


def commit_of(revision: str) -> str | None:
    """Full name of a git revision of this checkout, None where there is none."""
    try:
        done = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def checkout(commit: str):
    """A worktree of `commit` with its native library built; removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _run(["git", "worktree", "add", "--detach", str(tree), commit], ROOT)
        try:
            if (tree / "kernels" / "cpu" / "build.py").is_file():
                _run([sys.executable, "kernels/cpu/build.py"], tree)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, capture_output=True)


def rows_of(tree: Path, names: list[str], budget_s: float) -> list[dict]:
    """Benchmark rows of those of `names` that the tree's registry has, measured by the tree's own code."""
    env = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "apexk.cli", "kernels", "bench"]
    listed = _run([*command, "--list"], tree, env).split("\n")
    there = [name for name in names if name in listed]
    if not there:
        return []
    path = tree / "rows.json"
    _run([*command, *there, "--budget", str(budget_s), "--json", str(path)], tree, env)
    return [row for row in json.loads(path.read_text())["rows"] if row["op"] != "roof"]


def read_baseline(path) -> list[dict]:
    """Rows of a file that `--json` or `--jsonl` wrote."""
    try:
        return [row for row in read_rows(path) if row["op"] != "roof"]
    except ValueError as error:
        raise Incomparable(error) from error


def compare(rows: list[dict], baselines: list[list[dict]], source: str, threshold: float) -> list[str]:
    """Gives each row that a baseline has on the same device a `baseline`: where from, its median, ours over it, whether it has
    regressed by more than `threshold` (0.1: a tenth). Returns a sentence for each that has. `Incomparable` where nothing compares."""
    known: dict[tuple, list[dict]] = {}
    for row in (row for rows_there in baselines for row in rows_there):
        known.setdefault((row["name"], row["device"]), []).append(row)
    ours = [row for row in rows if (row["name"], row.get("device")) in known]
    if not ours:
        there = sorted({device for _, device in known}) or ["nothing"]
        raise Incomparable(f"{source} has none of these cases on this device; it has {len(known)} cases on {', '.join(there)}")
    regressed = []
    for row in ours:
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
