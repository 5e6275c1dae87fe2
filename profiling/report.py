"""A timeline as text: totals by phase, then one line a layer, averaged over the steps of a phase.

    python -m profiling.report timeline.jsonl [--phase decode] [--skip STEPS] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from apexk.timeline import Recording, TimelineError, read

from .intervals import intersect, length, union
from .layers import LayerLine, layer_lines

MS = 1e6  # ns in a ms
LANES = {"gpu": "gpu_busy", "h2d": "channel_busy", "cpu": "cpu_busy"}


def phase_totals(recording: Recording, phase: str, skip: int = 0) -> dict | None:
    """Averages of one phase without its first `skip` steps, or None without a step.

    `busy` shares are of the steps' whole time. `paper_critical_ms` is the larger of the two *average* paths, as the
    paper states its numbers; `window_ms` is the average of the layers' own windows.
    """
    by_step = _by_step(layer_lines(recording.rows), phase, skip)
    if not by_step:
        return None
    lines = [line for group in by_step for line in group]
    steps = union((min(line.start_ns for line in group), max(line.end_ns for line in group)) for group in by_step)
    whole = length(steps)
    tokens = sum(group[0].tokens for group in by_step)
    paper_cpu, paper_gpu = _mean(lines, "paper_cpu_ns"), _mean(lines, "paper_gpu_ns")
    active = sum(line.n_active or 0 for line in lines)
    spec = sum(line.n_spec for line in lines)
    totals = {
        "steps": len(by_step),
        "layers": len(lines) / len(by_step),
        "tokens_per_step": tokens / len(by_step),
        "ms_per_step": whole / MS / len(by_step),
        "tokens_per_s": tokens / whole * 1e9,
        "window_ms": _mean(lines, "critical_ns"),
        "paper_cpu_ms": paper_cpu,
        "paper_gpu_ms": paper_gpu,
        "paper_critical_ms": max(paper_cpu, paper_gpu),
        "exposed_exact_ms": _mean(lines, "exposed_exact_ns"),
        "gpu_stall_ms": _mean(lines, "stall_ns"),
        "hit_rate": sum(line.n_resident or 0 for line in lines) / active if active else None,
        "exact_per_layer": fmean(line.n_exact for line in lines),
        "cpu_experts_per_layer": fmean(line.n_cpu for line in lines),
        "spec_per_layer": spec / len(lines),
        "spec_used_share": sum(line.spec_used for line in lines) / spec if spec else None,
        "mib_per_step": sum(line.transfer_bytes for line in lines) / len(by_step) / 2**20,
    }
    for lane, name in LANES.items():
        work = union(
            (row["start_ns"], row["end_ns"])
            for row in recording.rows
            if row["lane"] == lane and row["kind"] != "unattributed"
        )
        totals[name] = length(intersect(work, steps)) / whole
    return totals


def layer_table(recording: Recording, phase: str, skip: int = 0) -> list[dict]:
    """One row a layer: averages over the phase's steps; times in ms."""
    groups: dict[int, list[LayerLine]] = defaultdict(list)
    for group in _by_step(layer_lines(recording.rows), phase, skip):
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
            "stall": _mean(lines, "stall_ns"),
            "resident": fmean(line.n_resident or 0 for line in lines),
            "exact": fmean(line.n_exact for line in lines),
            "cpu_exp": fmean(line.n_cpu for line in lines),
            "spec": fmean(line.n_spec for line in lines),
            "used": fmean(line.spec_used for line in lines),
            "last": max(("cpu", "gpu", "transfer"), key=[line.last for line in lines].count),
        }
        for layer, lines in sorted(groups.items())
    ]


def text(recording: Recording, phases=("prefill", "decode"), skip: int = 0) -> str:
    """The report for people."""
    parts = [_title(recording)]
    for phase in phases:
        totals = phase_totals(recording, phase, skip)
        if totals is None:
            continue
        parts.append(f"\n{phase}: {totals['steps']} steps")
        parts.append("\n".join(f"  {name:<22} {_number(value):>10}" for name, value in totals.items() if name != "steps"))
        parts.append(f"\n{phase}, mean of each layer (times in ms; experts a step)")
        parts.append(_table(layer_table(recording, phase, skip)))
    if len(parts) == 1:
        parts.append("no complete layer in what was asked for")
    return "\n".join(parts) + "\n"


def _by_step(lines: list[LayerLine], phase: str, skip: int) -> list[list[LayerLine]]:
    groups: dict[int, list[LayerLine]] = defaultdict(list)
    for line in lines:
        if line.phase == phase:
            groups[line.step].append(line)
    return [groups[step] for step in sorted(groups)][skip:]


def _title(recording: Recording) -> str:
    header = recording.header
    modelled = any(row["modelled"] for row in recording.rows)
    clock = f"times modelled on {header['hardware']}" if modelled else "times measured"
    config = header["config"] if isinstance(header["config"], dict) else {}
    return f"policy {config.get('policy', '?')}, pool {config.get('pool', '?')} slots a layer, device {header['device']}, {clock}"


def _mean(lines: list[LayerLine], field: str) -> float:
    return fmean(getattr(line, field) for line in lines) / MS


def _number(value) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _table(rows: list[dict]) -> str:
    cells = [list(rows[0])] + [[_number(value) for value in row.values()] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="profiling.report", description=__doc__.splitlines()[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("--phase", choices=("prefill", "decode"), help="default: both")
    parser.add_argument("--skip", type=int, default=0, metavar="STEPS", help="leave out the first STEPS of each phase")
    parser.add_argument("--partial", action="store_true", help="the file of a run that was killed")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the numbers here")
    options = parser.parse_args(arguments)
    try:
        recording = read(options.timeline, partial=options.partial)
    except (OSError, TimelineError) as error:
        print(error, file=sys.stderr)
        return 1
    phases = (options.phase,) if options.phase else ("prefill", "decode")
    sys.stdout.write(text(recording, phases, options.skip))
    if options.json:
        numbers = {
            phase: {"totals": totals, "layers": layer_table(recording, phase, options.skip)}
            for phase in phases
            if (totals := phase_totals(recording, phase, options.skip))
        }
        options.json.write_text(json.dumps({"header": recording.header, "phases": numbers}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
