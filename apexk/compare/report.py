"""The comparison as a person and as a program reads it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from apexk.compare.measure import FIGURES, Place, Row

SCHEMA = "apexk.compare/1"
COLUMNS = ("system", "decode tokens/s", "% of clairvoyant", "prefill tokens/s", "TTFT s", "GPU busy", "idle", "waits: copies", "CPU", "stall ms",
           "GB a step", "hits", "lossless")  # fmt: skip
LOSSY = "NO: lossy, by copies of fewer bits a weight (int8, int4) or by experts that are added one layer late (deferred); `apexk payload` measures what a model loses by that"


def by_place(rows: Iterable[Row]) -> dict[Place, list[Row]]:
    """Rows of each place, systems by falling decode throughput, references last."""
    found: dict[Place, list[Row]] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
    for place, here in found.items():
        found[place] = sorted(here, key=lambda r: (r.reference, -(r.mean["decode_tokens_per_s"] or 0.0)))
    return found


def heading(place: Place) -> str:
    work = place.work
    what = "recorded" if work.path else f"{work.model}, {work.batch} requests of {work.prompt} tokens"
    return f"{place.label}: {what}, {place.pool} slots a layer" + (", costs scaled to its experts" if place.scale else "")


def cells(row: Row) -> list[str]:
    """A row's words, in the order of `COLUMNS`."""
    mean = row.mean

    def value(name: str, digits: int = 1, by: float = 1.0) -> str:
        return "-" if mean[name] is None else f"{by * mean[name]:.{digits}f}"

    half = row.half["decode_tokens_per_s"]
    lossless = "yes" if row.lossless else f"NO, {'deferred' if row.system.payload == 'plain' else row.system.payload}"
    return [
        row.system.name, value("decode_tokens_per_s") + ("" if half is None else f" ± {half:.1f}"),
        "-" if row.percent_of_clairvoyant is None else f"{row.percent_of_clairvoyant:.0f}",
        value("prefill_tokens_per_s", 0), value("ttft_ms", 2, 1e-3), value("gpu_busy", 2), value("gpu_idle", 2), value("for_weights", 2), value("for_cpu", 2),
        value("stall_ms"), value("decode_gb", 2), value("hit_rate", 2), "reference" if row.reference else lossless,
    ]  # fmt: skip


def as_text(rows: Sequence[Row]) -> str:
    """A table a place, for a terminal."""
    parts = []
    for place, here in by_place(rows).items():
        lines = [list(COLUMNS), *map(cells, here)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        body = ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip() for line in lines]
        parts.append("\n".join([heading(place), *body]))
    lossy = not all(row.lossless for row in rows)
    return "\n\n".join([*parts, "modelled, not measured; ± half of the 95 % interval over seeds" + (f"\n{LOSSY}" if lossy else "")])


def as_json(rows: Sequence[Row], command: str) -> dict:
    return {"schema": SCHEMA, "command": command, "figures": {name: {"unit": unit, "what": what} for name, (unit, what) in FIGURES.items()}, "rows": [_flat(r) for r in rows]}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a system and place; a figure's half width in `NAME_half_95`."""
    flat = []
    for row in rows:
        data = _flat(row)
        mean, half = data.pop("mean"), data.pop("half_95")
        flat.append(data | mean | {f"{name}_half_95": value for name, value in half.items()})
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Row) -> dict:
    work, place, system = row.place.work, row.place, row.system
    return {
        "system": system.name, "policy": system.spec, "lossless": row.lossless, "payload": system.payload, "reference": row.reference, "trace": work.path or work.preset,
        "model": None if work.path else work.model, "batch": None if work.path else work.batch, "prompt": work.prompt, "hardware": place.machine,
        "pool": place.pool, "seeds": row.seeds, "modelled": True, "percent_of_clairvoyant": row.percent_of_clairvoyant, "mean": row.mean, "half_95": row.half,
    }  # fmt: skip
