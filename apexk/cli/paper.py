"""`apexk paper`: the paper's figures and tables, ours beside the paper's."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from apexk.arguments import whole, wholes
from apexk.cli import DONE, FAILED
from apexk.cli.progress import bar, table
from apexk.outputs import out_file, out_folder, write_json

NAMES = ("fig1", "fig2", "fig3a", "fig3b", "fig3c", "fig3d", "fig5", "fig6", "fig7", "table1", "table2", "table3", "pools")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("figure", choices=(*NAMES, "all", "sensitivity"), help="all: every row; sensitivity: the headline figures over hardware constants")
    parser.add_argument("--seeds", type=wholes(0), default="0,1,2", help="of the rows with a band (default: 0,1,2)")
    parser.add_argument("--jobs", type=whole(), default=min(2, os.cpu_count() or 1), help="processes (default: up to 2)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every row here")
    parser.add_argument("--draw", type=partial(out_folder, holds=("*.png", "*.timeline.jsonl")), metavar="DIR", help="draw the figures into this folder")


def run(args: argparse.Namespace) -> int:
    seeds = tuple(args.seeds)
    if args.figure == "sensitivity":
        return _sensitivity(args, seeds)
    from apexk.paper.figures import TIMELINES, rows

    names = list(NAMES) if args.figure == "all" else [args.figure]
    found, measured = rows(names, seeds, args.jobs, bar("paper"))
    if found:
        print(show(found))
    if args.json:
        data = {"schema": "apexk.paper/1", "hardware": "a6000-paper", "modelled": True, "seeds": seeds, "rows": [r.as_dict() for r in found]}
        write_json(args.json, data)
    folder = args.draw or (Path("out") if args.figure in TIMELINES else None)
    if folder:
        print("written: " + ", ".join(str(p) for p in _draw(names, found, measured, folder)))
    return FAILED if any(r.status == "missed" for r in found) else DONE


def show(found) -> str:
    """One line a row, and what was missed."""
    lines = [["id", "ours", "paper", "unit", "deviation", "band", "role", "status"]]
    for r in found:
        deviation = "-" if r.deviation is None else f"{r.deviation:+.1f} %"
        lines.append([r.id, _short(r.ours), _short(r.paper), r.unit[:24] or "-", deviation, r.band, r.role, r.status])
    counts = {s: sum(r.status == s for r in found) for s in ("met", "missed", "report-only")}
    notes = list(dict.fromkeys(f"{r.figure}: {r.note}" for r in found if r.note and r.figure != "facts"))
    return "\n".join([table(lines), "", "modelled times on a6000-paper; " + ", ".join(f"{n} {s}" for s, n in counts.items()), *notes])


def _short(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e-2 else f"{value:.2f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 44 else text[:41] + "..."


def _draw(names: list[str], found, measured, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    try:
        from apexk.paper import draw
        from apexk.profiling.plot import layer_timeline
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("paper: no pictures: they need matplotlib (pip install 'apexk[plots]')", file=sys.stderr)
        return []
    for name in names:
        if name == "fig2":
            from apexk.paper import timelines

            for path in timelines.write(folder):
                picture = folder / path.name.replace(".timeline.jsonl", ".png")
                layer_timeline(path, picture)
                written.append(picture)
        else:
            written.append(draw.draw(name, found, measured.get, folder))
    return [path for path in written if path]


def _sensitivity(args: argparse.Namespace, seeds: tuple[int, ...]) -> int:
    from apexk.paper.sensitivity import POLICIES, grid

    found = grid(seeds, args.jobs, bar("sensitivity"))
    lines = [["constants", "none", "EA", "Apex, rates", "Apex", "gain over none", "% clairvoyant"]]
    for point in found:
        v = point["tokens_per_s"]
        lines.append([point["label"], *(f"{v[k]:.1f}" for k in POLICIES if k != "clairvoyant"),
                      f"{point['gain_percent']:+.1f} %", f"{point['percent_of_clairvoyant']:.1f}"])
    print(table(lines) + "\n\nmodelled tokens/s, batch 16, pool 64; * the hardware file's own constants")
    if args.json:
        write_json(args.json, {"schema": "apexk.sensitivity/1", "points": found})
    return DONE
