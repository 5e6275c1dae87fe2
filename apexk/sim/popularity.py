"""Popularity files, `apexk.popularity/1`: activation counts on a calibration split, for the first residents of every policy.

JSON: schema, model, split, layers, experts, `counts [L][E]`, and a fingerprint of each counted sequence, by which overlap
with a trace that is then evaluated shows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apexk.inputs import reading
from apexk.outputs import write_text
from apexk.sim.demand import counts as count_of
from apexk.sim.trace import Trace

SCHEMA = "apexk.popularity/1"


@dataclass(frozen=True)
class Popularity:
    """`counts [layers][experts]` on `split` of `model`; `sequences` are fingerprints of what was counted."""

    model: str
    split: str
    counts: list[list[int]]
    sequences: frozenset[str]


def count(trace: Trace, split: str) -> Popularity:
    """Counts a whole trace."""
    if not trace.tokens:
        raise ValueError(f"{trace.source} has no token to count")
    table = count_of(trace.routed_experts, trace.experts)
    return Popularity(str(trace.meta.get("model")), split, table.tolist(), sequences(trace))


def sequences(trace: Trace) -> frozenset[str]:
    """A fingerprint of each request: its routing in order of position. Equal text on the same model routes equally."""
    found = set()
    for request in np.unique(trace.request):
        rows = np.flatnonzero(trace.request == request)
        rows = rows[np.argsort(trace.position[rows], kind="stable")]
        found.add(hashlib.sha256(np.ascontiguousarray(trace.routed_experts[rows]).tobytes()).hexdigest()[:16])
    return frozenset(found)


def overlap(popularity: Popularity, trace: Trace) -> float:
    """Share of the trace's requests that were counted too."""
    seen = sequences(trace)
    return len(seen & popularity.sequences) / len(seen) if seen else 0.0


def write(popularity: Popularity, path: str | Path) -> None:
    data = {
        "schema": SCHEMA, "model": popularity.model, "split": popularity.split, "layers": len(popularity.counts),
        "experts": len(popularity.counts[0]), "counts": popularity.counts, "sequences": sorted(popularity.sequences),
    }  # fmt: skip
    write_text(Path(path), json.dumps(data) + "\n")


def read(path: str | Path, *, model: str | None = None, layers: int | None = None, experts: int | None = None) -> Popularity:
    """Reads and checks a file. Raises ValueError with the fault, also if it is of another model or shape than asked for."""

    def fail(what: str):
        raise ValueError(f"popularity file {path}: {what}")

    with reading(path, "JSON"):
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        fail(f"schema is {data.get('schema') if isinstance(data, dict) else data!r}, wanted {SCHEMA!r}")
    missing = [k for k in ("model", "split", "counts", "sequences") if k not in data]
    if missing:
        fail(f"{', '.join(missing)} missing")
    counts, sequences = data["counts"], data["sequences"]
    table = isinstance(counts, list) and bool(counts) and all(isinstance(row, list) and len(row) == len(counts[0]) for row in counts)
    if not table or any(type(n) is not int or n < 0 for row in counts for n in row):
        fail("counts must be rows of equal length of whole numbers >= 0")
    if not isinstance(sequences, list) or not all(isinstance(s, str) for s in sequences):
        fail("sequences must be a list of fingerprints")
    if model is not None and data["model"] != model:
        fail(f"it is of {data['model']!r}, the trace of {model!r}")
    if layers is not None and (len(counts), len(counts[0])) != (layers, experts):
        fail(f"it has {len(counts)} layers of {len(counts[0])} experts, the trace {layers} of {experts}")
    return Popularity(data["model"], data["split"], counts, frozenset(sequences))
