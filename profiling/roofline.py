"""Benchmark rows as a roofline: speed over operations a byte, under the roofs that were measured in the same run.

    python -m profiling.roofline rows.jsonl roofline.png [--device NAME] [--dark]      (this is `apexk kernels plot`)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from apexk.arguments import Parser
from apexk.inputs import reading
from apexk.outputs import picture_file, save_figure, worded

from .style import headline, legend, plain, theme

MARKERS = "osD^vP*X"


def read_rows(path: str | Path) -> list[dict]:
    """Rows of a JSONL file, or of a document with `rows`. ValueError for anything else."""
    with reading(path, "benchmark rows, which `apexk kernels bench --jsonl` writes"):
        text = Path(path).read_text(encoding="utf-8")
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            rows = json.loads(text)["rows"]
    if not rows or not all(isinstance(row, dict) and "op" in row for row in rows):
        raise ValueError(f"{path} holds no benchmark rows; `apexk kernels bench --jsonl` writes them")
    return rows


def draw(rows: list[dict], path: str | Path, device: str | None = None, *, dark: bool = False) -> int:
    """Draws the rows of one device (default: the first that has any) with its roofs; returns how many points there are.
    A later row of a name replaces an earlier one. ValueError where there is nothing to draw."""
    there = list(dict.fromkeys(row["device"] for row in rows if row.get("flops") and row["op"] != "roof"))
    if not there or (device and device not in there):
        raise ValueError(f"no row with operations{f' on {device!r}' if device else ''}; devices: {', '.join(there) or 'none'}")
    device = device or there[0]
    mine = {row["name"]: row for row in rows if row["device"] == device}
    points = [row for row in mine.values() if row["op"] != "roof" and row["flops"]]
    roofs = [row for row in mine.values() if row["op"] == "roof" and not row["name"].endswith(("copy", "h2d"))]
    look = theme(dark)
    figure, axes = plt.subplots(figsize=(9.6, 5.6), dpi=150)
    intensity = np.array([row["flops"] / row["bytes"] for row in points])
    speed = np.array([row["flops"] / row["p50_ns"] for row in points])
    low, high = intensity.min() / 1.6, intensity.max() * 1.6
    along = _roofs(axes, look, roofs, low, high)
    providers, ops = (list(dict.fromkeys(row[key] for row in points)) for key in ("provider", "op"))
    for i, provider in enumerate(providers):
        color = look.series[i % len(look.series)]
        for k, op in enumerate(ops):
            marker = MARKERS[(k if len(ops) > 1 else i) % len(MARKERS)]
            chosen = [n for n, row in enumerate(points) if (row["provider"], row["op"]) == (provider, op)]
            if chosen:
                label = provider if len(ops) == 1 else f"{op}, {provider}"
                axes.plot(intensity[chosen], speed[chosen], marker, color=color, markersize=6.5, alpha=0.85, markeredgewidth=0, label=label)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="operations a byte that the task needs", ylabel="GFLOP/s")
    axes.set_ylim(speed.min() / 2, max([speed.max(), *(row["value"] for row in roofs if row["unit"] == "GFLOP/s")]) * 1.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    plain(figure, axes, look, grid="both")
    legend(axes, look, loc="center left", bbox_to_anchor=(1.0, 0.5), handletextpad=0.3)
    figure.tight_layout(rect=(0, 0.03, 1, 0.945))
    for words, (x, y) in along:  # only now is it known how steep a roof is on the page
        (left, bottom), (right, top) = axes.transData.transform([(x, y), (2 * x, 2 * y)])
        words.set_rotation(np.degrees(np.arctan2(top - bottom, right - left)))
    commits = ", ".join(sorted({(row["commit"] or "unknown")[:10] + ("+" if row["dirty"] else "") for row in points}))
    headline(figure, look, f"Kernel benchmarks under measured roofs: {device}", f"medians; commit {commits}", left=axes.get_position().x0)
    save_figure(figure, path, facecolor=look.page)
    plt.close(figure)
    return len(points)


def _roofs(axes, look, roofs: list[dict], low: float, high: float) -> list:
    """Memory roofs rise with the intensity until the highest compute roof, which are level; each has its name on it. Returns
    the names that are still to be turned along their roofs, each with its place."""
    along = []
    compute = [row for row in roofs if row["unit"] == "GFLOP/s"]
    ceiling = max([row["value"] for row in compute], default=np.inf)
    x = np.geomspace(low, high, 200)
    for row in roofs:
        name, value = row["name"].removeprefix("roof/"), row["value"]
        if row["unit"] == "GFLOP/s":
            axes.plot(x, np.full_like(x, value), color=look.ink, linewidth=1.2, zorder=1)
            axes.annotate(f"{name} {value:.0f} GFLOP/s", (high, value), (-4, 3), textcoords="offset points", ha="right", va="bottom", fontsize=8, color=look.ink)
        else:
            under = x[x * value <= ceiling * 1.0001]
            if len(under):
                axes.plot(under, under * value, color=look.ink, linewidth=1.2, zorder=1)
                at = under[len(under) // 3]
                words = axes.annotate(f"{name} {value:.1f} GB/s", (at, at * value), (-2, 4), textcoords="offset points", ha="left", va="bottom", fontsize=8,
                                      color=look.ink, rotation_mode="anchor")  # fmt: skip
                along.append((words, (at, at * value)))
    return along


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="apexk kernels plot", description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="what `apexk kernels bench --jsonl` or --json wrote")
    parser.add_argument("png", type=picture_file, help="where to draw them")
    parser.add_argument("--device", help="as in the rows; default: the first")
    parser.add_argument("--dark", action="store_true", help="for a dark screen")
    try:
        options = parser.parse_args(arguments)
        count = draw(read_rows(options.rows), options.png, options.device, dark=options.dark)
    except (OSError, ValueError) as error:
        print(worded(error), file=sys.stderr)
        return 2
    print(f"{count} points: {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
