"""The table that the repository keeps of the gate's figures, one file a Triton version, and what counts as a regression.

Registers may move a little from one compiler to the next; what must not get worse is what costs speed at once: spills,
blocks that fit on an SM, the kind of tensor-core instruction, the width of copies.
"""

import json
from pathlib import Path

from .compile import Report

FOLDER = Path(__file__).parent / "kept"


def path_of(triton_version: str) -> Path:
    return FOLDER / f"triton-{triton_version}.jsonl"


def entry(report: Report, name: str) -> dict:
    part = report.loop if report.loop.instructions else report.all
    return {
        "target": report.target, "name": name, "regs": report.regs, "spill_bytes": report.spill_bytes,
        "shared_bytes": report.shared_bytes, "blocks": report.blocks, "mma": sorted(report.loop.mma),
        "copies": sorted(part.copies), "loads": sorted(part.loads), "inflight_kib": report.inflight_kib,
    }  # fmt: skip


def save(path: Path, entries) -> None:
    """One line an entry, in order, so that a difference reads well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(entries, key=lambda e: (e["name"], e["target"]))
    path.write_text("".join(json.dumps(e) + "\n" for e in ordered), encoding="utf-8")


def load(path: Path) -> dict:
    """(target, name) -> entry; empty where nothing is kept for that Triton."""
    if not path.is_file():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(e["target"], e["name"]): e for e in entries}


def regressions(now: dict, before: dict | None) -> list[str]:
    """What got worse since `before` was kept."""
    if before is None:
        return ["not in the kept table: look at its figures and run the gate with --keep"]
    wrong = []
    if now["spill_bytes"] > before["spill_bytes"]:
        wrong.append(f"spills {now['spill_bytes']} bytes, kept {before['spill_bytes']}")
    if now["blocks"] < before["blocks"]:
        wrong.append(f"{now['blocks']} blocks an SM, kept {before['blocks']}")
    for what in ("mma", "copies"):
        if now[what] != before[what]:
            wrong.append(f"{what} {now[what]}, kept {before[what]}")
    return wrong
