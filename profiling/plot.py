"""Draws a layer timeline: what the GPU, the copy channel and the CPU workers did, and when. Needs matplotlib.

    python -m profiling.plot timeline.jsonl layer.png [--step N] [--layers FIRST-LAST]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from apexk.outputs import save_figure, worded
from apexk.timeline import Recording

from .layers import LayerLine, lines_of
from .load import load
from .style import STYLE, Theme, clock, theme
from .tables import MS

LANES = {"gpu": "GPU", "h2d": "copy channel", "cpu": "CPU workers"}

NOTE = "Numbers: the expert in a copy, else how many experts. Dashed: routing is known. Above: from there to the end of the merge."
MOST_LAYERS = 3  # drawn unless told otherwise; more bars than these cannot be labelled on one page
BAR = 0.62  # height of a bar, in lanes


def draw_all(recording: Recording, folder: str | os.PathLike, *, dark: bool = False) -> list[Path]:
    """Every picture that the run has data for, into `folder`; their paths."""
    from .pictures import PICTURES

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, draw in {"layer_timeline": layer_timeline, **PICTURES}.items():
        path = folder / f"{name}.png"
        if draw(recording, path, dark=dark) is not False:
            made.append(path)
    return made


def layer_timeline(
    source: str | os.PathLike | Recording,
    path_out_png: str | os.PathLike,
    steps: int | Sequence[int] | None = None,
    title: str | None = None,
    layers: Sequence[int] | None = None,
    *,
    dark: bool = False,
) -> None:
    """Draw `source` (a file that `load` reads, or what it returned) to `path_out_png`.

    Default: a warm decode step of middling duration, and up to three layers from its middle. Raises `ValueError` where
    the timeline has no such step or layer, with those that it has.
    """
    recording = source if isinstance(source, Recording) else load(source)
    look = theme(dark)
    lines = lines_of(recording)
    if not lines:
        raise ValueError("no complete layer to draw")
    shown = _select(lines, steps, layers)
    begin, end = min(line.start_ns for line in shown), max(line.end_ns for line in shown)
    rows = [row for row in recording.rows if row["lane"] in LANES and row["start_ns"] < end and row["end_ns"] > begin]

    figure, axes = plt.subplots(figsize=(12.5, 4.5), dpi=150, facecolor=look.page)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.90, bottom=0.24)
    axes.set_facecolor(look.page)
    axes.set_xlim(0, (end - begin) / MS)
    axes.set_ylim(len(LANES) - 0.5 + 0.12, -0.5 - 0.42)
    for row in rows:
        _draw_bar(axes, row, begin, end, look)
    for line in shown:
        _draw_layer(axes, line, begin, look, name_step=len({other.step for other in shown}) > 1)
    _decorate(axes, [_kind(row) for row in rows if row["end_ns"] > row["start_ns"]], look)
    axes.set_title(f"{title or _title(recording, shown)} \u2014 {clock(recording)}", loc="left", color=look.ink, fontsize=11.5, pad=10)
    figure.text(0.985, 0.015, NOTE, ha="right", color=look.faint, fontsize=8)
    save_figure(figure, path_out_png)
    plt.close(figure)


def _select(lines: list[LayerLine], steps, layers) -> list[LayerLine]:
    if steps is None:
        steps = [_typical_step(lines)]
    elif isinstance(steps, int):
        steps = [steps]
    of_steps = [line for line in lines if line.step in set(steps)]
    if not of_steps:
        raise ValueError(f"no step {', '.join(map(str, steps))}; there are {_span(lines, 'step')}")
    if layers is None:
        there = sorted({line.layer for line in of_steps})
        first = max(0, (len(there) - MOST_LAYERS) // 2)
        layers = there[first : first + MOST_LAYERS]
    shown = [line for line in of_steps if line.layer in set(layers)]
    if not shown:
        raise ValueError(f"no layer {', '.join(map(str, layers))}; there are {_span(of_steps, 'layer')}")
    return shown


def _typical_step(lines: list[LayerLine]) -> int:
    """Step of middling duration among the later half of the decode steps; without decode, among all later steps."""
    time: dict[int, int] = {}
    for line in [line for line in lines if line.phase == "decode"] or lines:
        time[line.step] = time.get(line.step, 0) + line.end_ns - line.start_ns
    warm = sorted(time)[len(time) // 2 :]
    return sorted(warm, key=time.__getitem__)[len(warm) // 2]


def _span(lines: list[LayerLine], field: str) -> str:
    found = {getattr(line, field) for line in lines}
    return f"{min(found)} to {max(found)}"


def _kind(row: dict) -> str:
    return "abandoned" if row.get("abandoned") else row["kind"]


def _draw_bar(axes: Axes, row: dict, begin: int, end: int, look: Theme) -> None:
    start, stop = max(row["start_ns"], begin), min(row["end_ns"], end)
    if stop <= start or _kind(row) not in STYLE:
        return
    kind = _kind(row)
    face, hatch = look.faces[kind], STYLE[kind][1]
    lane = list(LANES).index(row["lane"])
    left, width = (start - begin) / MS, (stop - start) / MS
    edge = look.faint if hatch else look.page
    axes.add_patch(
        Rectangle((left, lane - BAR / 2), width, BAR, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.7)
    )
    for text in _labels(row):
        if _fits(axes, text, width):
            box = {"facecolor": face, "edgecolor": "none", "pad": 1.2} if hatch else None
            ink = look.page if kind in look.inverse else look.ink
            axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=8, color=ink, bbox=box)
            break


def _labels(row: dict) -> list[str]:
    """What to write into a bar, longest first."""
    count, kind = len(row["experts"]), row["kind"]
    if kind in ("copy.exact", "copy.spec"):
        expert = " ".join(map(str, row["experts"]))
        long = f"{expert}\u2192L{row['layer']}" if kind == "copy.spec" else f"expert {expert}"
        return [long, expert]
    if kind in ("host.ffn", "gpu.resident", "gpu.arrived"):
        if not count:
            return ["fixed cost, no experts", "no experts"]
        experts = f"{count} expert{'s' * (count != 1)}"
        return [f"{experts}, {row['tokens']} rows", experts, str(count)]
    return []


def _fits(axes: Axes, text: str, width: float) -> bool:
    """Whether text of 8 points fits into `width` ms, at a mean glyph width of 4.6 points."""
    low, high = axes.get_xlim()
    points = axes.get_window_extent().width / axes.figure.dpi * 72
    return 4.6 * len(text) + 3 < width / (high - low) * points


def _draw_layer(axes: Axes, line: LayerLine, begin: int, look: Theme, name_step: bool) -> None:
    """Boundary and name of a layer, its routing event, and how long its window took."""
    start, routed, end = ((t - begin) / MS for t in (line.start_ns, line.end_ns - line.critical_ns, line.end_ns))
    for boundary in (start, end):
        axes.axvline(boundary, color=look.ink, linewidth=1.1, zorder=0.5)
    axes.axvline(routed, color=look.faint, linewidth=0.9, linestyle=(0, (3, 3)), ymax=0.88, zorder=0)
    late = {"cpu": "CPU", "gpu": "GPU", "transfer": "copies"}.get(line.last, "-")
    step, short = (f"step {line.step}, ", f"{line.step}/") if name_step else ("", "")
    texts = (f"{step}layer {line.layer}: {line.critical_ns / MS:.2f} ms, {late} last", f"{step}layer {line.layer}", f"{short}L{line.layer}")
    fitting = [text for text in texts if _fits(axes, text, end - start)]
    axes.text((start + end) / 2, -0.5 - 0.2, (fitting or texts)[0 if fitting else -1], ha="center", va="center", fontsize=8.5, color=look.ink)


def _decorate(axes: Axes, kinds: list[str], look: Theme) -> None:
    axes.set_yticks(range(len(LANES)), LANES.values(), fontsize=10, color=look.ink)
    axes.set_xlabel("ms", color=look.ink, fontsize=9.5, labelpad=1)
    axes.tick_params(axis="both", length=0, labelcolor=look.ink)
    axes.spines["bottom"].set_color(look.faint)
    axes.tick_params(axis="x", length=3, color=look.faint)
    for lane in range(len(LANES)):
        axes.axhspan(lane - 0.41, lane + 0.41, color=look.panel, zorder=-1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    patches = [
        Patch(facecolor=look.faces[kind], hatch=hatch, edgecolor=look.faint, linewidth=0.7, label=label)
        for kind, (label, hatch) in STYLE.items()
        if kind in kinds
    ]
    columns = len(patches) if len(patches) < 8 else (len(patches) + 1) // 2  # eight labels are wider than the page
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, frameon=False,
                fontsize=8.5, handlelength=1.6, columnspacing=1.2, labelcolor=look.ink)  # fmt: skip


def _title(recording: Recording, shown: list[LayerLine]) -> str:
    header, line = recording.header, shown[0]
    if "profile" in header:
        return f"{line.phase} step {line.step}, {line.tokens} tokens"
    config = header["config"] if isinstance(header["config"], dict) else {}
    model = header["model"] if isinstance(header["model"], dict) else {}
    name = model.get("name") or model.get("model_type") or ""
    parts = [f"{config.get('policy', '')} {name}".strip(), f"{line.phase} step {line.step}", f"{line.tokens} tokens"]
    if config.get("pool") is not None:
        parts.insert(1, f"{config['pool']} slots a layer")
    return ", ".join(part for part in parts if part)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="profiling.plot", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--step", type=int, help="default: a warm decode step of middling duration")
    parser.add_argument("--layers", metavar="FIRST-LAST", help="default: three layers from the middle")
    parser.add_argument("--title")
    parser.add_argument("--dark", action="store_true", help="for a dark screen")
    options = parser.parse_args(arguments)
    try:
        first, _, last = (options.layers or "").partition("-")
        layers = range(int(first), int(last or first) + 1) if first else None
        layer_timeline(options.file, options.png, options.step, options.title, layers, dark=options.dark)
    except (OSError, ValueError) as error:
        print(worded(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
