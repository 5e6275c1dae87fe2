"""Layer lines -> totals of a phase, one row a layer, and what changed between two runs."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from statistics import fmean

from apexk.timeline import Recording
from apexk.timeline.schema import PHASES

from .intervals import intersect, length, union
from .layers import COLUMNS, LANES, LayerLine, lines_of

MS = 1e6  # ns in a ms
LAST = ("cpu", "gpu", "transfer")
PAPER = ("paper_cpu_ns", "paper_gpu_ns")


def phase_totals(recording: Recording, phase: str, skip: int = 0) -> dict | None:
    """Averages of one phase without its first `skip` steps, or None without a step.

    `busy` shares are of the steps' whole time. `paper_critical_ms` is the larger of the two *average* paths, as the
    paper states its numbers; `window_ms` is the average of the layers' own windows.
    """
    groups = by_step(lines_of(recording), phase, skip)
    if not groups:
        return None
    lines = [line for group in groups for line in group]
    steps = union((min(line.start_ns for line in group), max(line.end_ns for line in group)) for group in groups)
    whole = length(steps)
    tokens = sum(group[0].tokens for group in groups)
    paper_cpu, paper_gpu = _mean(lines, "paper_cpu_ns"), _mean(lines, "paper_gpu_ns")
    active, spec = sum(line.n_active or 0 for line in lines), sum(line.n_spec for line in lines)
    copying, moved = sum(line.transfer_ns for line in lines), sum(line.transfer_bytes for line in lines)
    totals = {
        "steps": len(groups),
        "layers": len(lines) / len(groups),
        "tokens_per_step": tokens / len(groups),
        "ms_per_step": whole / MS / len(groups),
        "tokens_per_s": tokens / whole * 1e9 if whole else None,
        "window_ms": _mean(lines, "critical_ns"),
        "paper_cpu_ms": paper_cpu,
        "paper_gpu_ms": paper_gpu,
        "paper_critical_ms": max(paper_cpu, paper_gpu),
        "exposed_exact_ms": _mean(lines, "exposed_exact_ns"),
        "exposed_wall_ms": _mean(lines, "exposed_wall_ns"),
        "overlap_copy_cpu_ms": _mean(lines, "overlap_xc_ns"),
        "overlap_gpu_cpu_ms": _mean(lines, "overlap_gc_ns"),
        "hidden_spec_ms": _mean(lines, "hidden_spec_ns"),
        "gpu_stall_ms": _mean(lines, "stall_ns"),
        "idle_ms": _mean(lines, "idle_ns"),
        "hit_rate": sum(line.n_resident or 0 for line in lines) / active if active else None,
        "exact_per_layer": fmean(line.n_exact for line in lines),
        "cpu_experts_per_layer": fmean(line.n_cpu for line in lines),
        "spec_per_layer": spec / len(lines),
        "spec_used_share": sum(line.spec_used for line in lines) / spec if spec else None,
        "mib_per_step": moved / len(groups) / 2**20,
        "copy_gbps": moved / copying if copying else None,
    }
    for lane, name in LANES.items():
        work = union((row["start_ns"], row["end_ns"]) for row in recording.rows if row["lane"] == lane and row["kind"] != "unattributed")
        totals[name] = length(intersect(work, steps)) / whole if whole else 0.0
    return totals | {f"last_{name}": sum(line.last == name for line in lines) / len(lines) for name in LAST}


def layer_table(recording: Recording, phase: str, skip: int = 0) -> list[dict]:
    """One row a layer: averages over the phase's steps; times in ms."""
    groups: dict[int, list[LayerLine]] = defaultdict(list)
    for group in by_step(lines_of(recording), phase, skip):
        for line in group:
            groups[line.layer].append(line)
    return [
        {
            "layer": layer,
            "window": _mean(lines, "critical_ns"),
            "cpu": _mean(lines, "cpu_path_ns"),
            "gpu": fmean((line.gpu_path_ns or 0) / MS for line in lines),
            "transfer": _mean(lines, "transfer_ns"),
            "exposed": _mean(lines, "exposed_exact_ns"),
            "wall": _mean(lines, "exposed_wall_ns"),
            "stall": _mean(lines, "stall_ns"),
            "idle": _mean(lines, "idle_ns"),
            "resident": fmean(line.n_resident or 0 for line in lines),
            "exact": fmean(line.n_exact for line in lines),
            "cpu_exp": fmean(line.n_cpu for line in lines),
            "spec": fmean(line.n_spec for line in lines),
            "used": fmean(line.spec_used for line in lines),
            "last": max(LAST, key=[line.last for line in lines].count),
        }
        for layer, lines in sorted(groups.items())
    ]


def differences(before: Recording, after: Recording, phase: str, skip: int = 0) -> tuple[list[dict], list[dict]]:
    """(totals that both runs have, layers that both have): before, after, their difference, and how many times as much."""
    totals = [phase_totals(recording, phase, skip) or {} for recording in (before, after)]
    changed = [_change(name, totals[0][name], totals[1].get(name)) for name in totals[0] if isinstance(totals[0][name], (int, float))]
    tables = [{row["layer"]: row for row in layer_table(recording, phase, skip)} for recording in (before, after)]
    layers = []
    for layer in sorted(tables[0].keys() & tables[1].keys()):
        a, b = tables[0][layer], tables[1][layer]
        row = {"layer": layer}
        for name in ("window", "cpu", "gpu", "exposed", "exact", "cpu_exp"):
            row |= {name: b[name], f"+{name}": b[name] - a[name]}
        layers.append(row | {"last": b["last"] if a["last"] == b["last"] else f"{a['last']}>{b['last']}"})
    return [row for row in changed if row], layers


def to_csv(recording: Recording, phases=PHASES, skip: int = 0) -> str:
    """Every line of every layer and step, times in ns; an empty cell is a thing that did not happen or is not known."""
    lines = lines_of(recording)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *PAPER])
    for phase in phases:
        for group in by_step(lines, phase, skip):
            writer.writerows([getattr(line, name) for name in (*COLUMNS, *PAPER)] for line in group)
    return out.getvalue()


def by_step(lines: list[LayerLine], phase: str, skip: int) -> list[list[LayerLine]]:
    """A phase's lines, one list a step, without the first `skip` steps."""
    groups: dict[int, list[LayerLine]] = defaultdict(list)
    for line in lines:
        if line.phase == phase:
            groups[line.step].append(line)
    return [groups[step] for step in sorted(groups)][skip:]


def _change(name: str, a, b) -> dict | None:
    if not isinstance(b, (int, float)):
        return None
    return {"what": name, "before": a, "after": b, "difference": b - a, "times": b / a if a else None}


def _mean(lines: list[LayerLine], field: str) -> float:
    return fmean(getattr(line, field) for line in lines) / MS
