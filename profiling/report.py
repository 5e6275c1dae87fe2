"""Runs as text: totals by phase, then one line a layer, averaged over the steps of a phase; two runs beside each other.

    python -m profiling.report FILE [FILE] [--phase decode] [--skip STEPS] [--csv OUT] [--json OUT] ...

FILE is a timeline.jsonl, an nsys sqlite export or a torch.profiler trace. This is `apexk report`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from apexk.arguments import Parser
from apexk.outputs import out_file, out_folder, picture_file, worded, write_json, write_text
from apexk.timeline import Recording

from .findings import findings
from .load import load
from .merge import complete
from .tables import PHASES, differences, layer_table, phase_totals, to_csv

DONE, MISUSE, LACKING = 0, 2, 3


def text(recording: Recording, phases=PHASES, skip: int = 0) -> str:
    """The report of one run for people."""
    parts = [title(recording)]
    for phase in phases:
        totals = phase_totals(recording, phase, skip)
        if totals is None:
            continue
        parts.append(f"\n{phase}: {totals['steps']} steps")
        parts.append("\n".join(f"  {name:<22} {number(value):>10}" for name, value in totals.items() if name != "steps"))
        parts.append(f"\n{phase}, mean of each layer (times in ms; experts a step)")
        parts.append(table(layer_table(recording, phase, skip)))
    if len(parts) == 1:
        parts.append("no complete layer in what was asked for")
    notes = findings(recording)
    if notes:
        parts.append("\nworth a look\n" + "\n".join(f"  - {note}" for note in notes))
    return "\n".join(parts) + "\n"


def comparison(runs: dict[str, Recording], phases=PHASES, skip: int = 0) -> str:
    """Totals of several runs, a column each; of exactly two also what changed, layer by layer."""
    parts = [f"{chr(97 + i)}: {name}: {title(recording)}" for i, (name, recording) in enumerate(runs.items())]
    for phase in phases:
        totals = [phase_totals(recording, phase, skip) for recording in runs.values()]
        if not any(totals):
            continue
        if len(runs) == 2 and all(totals):
            changed, layers = differences(*runs.values(), phase, skip)
            parts.append(f"\n{phase}: b against a\n" + table(changed))
            parts.append(f"\n{phase}, mean of each layer in b, and + what it has more than in a (ms; experts a step)\n" + table(layers))
            continue
        names = next(filter(None, totals))
        rows = [{"what": name} | {chr(97 + i): total and total[name] for i, total in enumerate(totals)} for name in names]
        parts.append(f"\n{phase}\n" + table(rows))
    return "\n".join(parts) + "\n"


def numbers(recording: Recording, phases=PHASES, skip: int = 0) -> dict:
    """The same for machines."""
    found = {phase: {"totals": totals, "layers": layer_table(recording, phase, skip)} for phase in phases if (totals := phase_totals(recording, phase, skip))}
    return {"header": recording.header, "phases": found, "findings": findings(recording)}


def title(recording: Recording) -> str:
    header = recording.header
    if "profile" in header:
        return f"{header['hardware']} on {header['device']}"
    modelled = any(row["modelled"] for row in recording.rows)
    clock = f"times modelled on {header['hardware']}" if modelled else "times measured"
    config = header["config"] if isinstance(header["config"], dict) else {}
    return f"policy {config.get('policy', '?')}, pool {config.get('pool', '?')} slots a layer, {_payload(config)}device {header['device']}, {clock}"


def _payload(config: dict) -> str:
    """What is lossy must say so; nothing where copies are plain."""
    name = config.get("payload", "plain")
    return "" if name == "plain" else f"{name} copies (lossy), "


def number(value) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def table(rows: list[dict]) -> str:
    if not rows:
        return "  nothing in common"
    cells = [list(rows[0])] + [[number(value) for value in row.values()] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    return "\n".join("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="+", help="timeline.jsonl, nsys .sqlite or torch.profiler .json; of two, the second is held against the first")
    parser.add_argument("--phase", choices=PHASES, help="default: both")
    parser.add_argument("--skip", type=int, default=0, metavar="STEPS", help="leave out the first STEPS of each phase")
    parser.add_argument("--partial", action="store_true", help="the file of a run that was killed")
    parser.add_argument("--timeline", type=Path, metavar="JSONL", help="complete a profile with decisions, and with what native threads did, from this timeline of the same run")
    parser.add_argument("--csv", type=out_file, metavar="OUT", help="also write every line of every layer and step here")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write totals, layers and findings here")
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="also draw a warm decode step here")
    parser.add_argument("--plots", type=partial(out_folder, holds=("*.png",)), metavar="DIR", help="also draw every picture into this folder")
    parser.add_argument("--dark", action="store_true", help="pictures for a dark screen")
    parser.add_argument("--html", type=out_file, metavar="OUT", help="also write tables, pictures and settings as one page that needs no network")
    parser.add_argument("--trace", type=out_file, metavar="OUT", help="also write a trace for ui.perfetto.dev here")


def run(options: argparse.Namespace) -> int:
    """Prints, and writes what is asked for. OSError and ValueError are the caller's."""
    if options.skip < 0:
        raise ValueError(f"--skip is {options.skip}; wanted 0 or more")
    runs = {str(path): load(path, partial=options.partial) for path in options.file}
    if options.timeline:
        profiles = [name for name, recording in runs.items() if "profile" in recording.header]
        if len(runs) != 1 or not profiles:
            raise ValueError("--timeline completes one profile (nsys or torch.profiler) with the timeline of the same run")
        runs = {name: complete(recording, load(options.timeline)) for name, recording in runs.items()}
    phases = (options.phase,) if options.phase else PHASES
    for name, recording in runs.items():
        _refuse_nothing(name, recording, phases, options)
    sys.stdout.write(text(*runs.values(), phases, options.skip) if len(runs) == 1 else comparison(runs, phases, options.skip))
    path, recording = list(runs.items())[-1]  # what is written is of the last run, and JSON of all
    if options.csv:
        write_text(options.csv, to_csv(recording, phases, options.skip))
    if options.json:
        found = {name: numbers(run, phases, options.skip) for name, run in runs.items()}
        write_json(options.json, found[path] if len(found) == 1 else {"runs": found})
    if options.trace:
        from .chrome import write_trace

        write_trace(recording, options.trace)
    code = _draw(recording, path, options, phases) if options.plot or options.plots or options.html else DONE
    for written in filter(None, (options.csv, options.json, options.trace, *((options.plot, options.html) if code == DONE else ()))):
        print(f"written: {written}", file=sys.stderr)
    return code


def _refuse_nothing(name: str, recording: Recording, phases, options: argparse.Namespace) -> None:
    """ValueError where --phase and --skip leave none of the steps that there are."""
    there = {phase: totals["steps"] for phase in PHASES if (totals := phase_totals(recording, phase))}
    if there and not any(there.get(phase, 0) > options.skip for phase in phases):
        asked = " ".join([f"--phase {options.phase}"] * bool(options.phase) + [f"--skip {options.skip}"] * bool(options.skip))
        raise ValueError(f"{asked} leaves nothing of {name}, which has {', '.join(f'{n} {phase} steps' for phase, n in there.items())}")


def _draw(recording: Recording, path: str, options: argparse.Namespace, phases) -> int:
    try:
        from . import html, plot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("pictures need matplotlib: pip install 'apexk[plots]'", file=sys.stderr)
        return LACKING
    if options.plot:
        plot.layer_timeline(recording, options.plot, dark=options.dark)
    if options.plots:
        for made in plot.draw_all(recording, options.plots, dark=options.dark):
            print(f"written: {made}", file=sys.stderr)
    if options.html:
        html.write_page(recording, options.html, path, phases, options.skip)
    return DONE


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="profiling.report", description=__doc__.splitlines()[0])
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except (OSError, ValueError) as error:
        print(worded(error), file=sys.stderr)
        return MISUSE


if __name__ == "__main__":
    sys.exit(main())
