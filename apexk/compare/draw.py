"""The picture of a comparison: each system's decode beside the clairvoyant run's, one panel a place. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from apexk.compare.measure import Row
from apexk.compare.report import by_place
from apexk.outputs import save_figure
from apexk.profiling.style import plain, theme

PARTS = (("gpu_busy", "GPU works", "gpu.resident"), ("for_weights", "waits for copies", "copy.exact"), ("for_cpu", "waits for the CPU", "host.ffn"))


def draw(rows: Sequence[Row], path: Path, *, dark: bool = False) -> Path:
    """Bars of decode throughput in percent of the clairvoyant run, split by what the GPU does in that time."""
    look, places = theme(dark), by_place(rows)
    across = min(2, len(places))
    down = -(-len(places) // across)
    tallest = max(len(here) for here in places.values())
    height = down * (0.24 * tallest + 0.9) + 0.9
    figure, axes = plt.subplots(down, across, figsize=(5.6 * across, height), squeeze=False, sharex=True)
    for axis in axes.flat[len(places) :]:
        axis.set_visible(False)
    for axis, (place, here) in zip(axes.flat, places.items(), strict=False):
        plain(figure, axis, look, grid="x")
        shown = [r for r in here if r.percent_of_clairvoyant and r.system.name != "all_resident"][::-1]  # its bar would be twice as long
        names = [r.system.name for r in shown]
        left = [0.0] * len(shown)
        for key, label, kind in PARTS:
            width = [r.percent_of_clairvoyant * r.mean[key] for r in shown]
            axis.barh(names, width, left=left, height=0.72, color=look.faces[kind], label=label)
            left = [a + b for a, b in zip(left, width, strict=True)]
        rest = [r.percent_of_clairvoyant - at for r, at in zip(shown, left, strict=True)]
        axis.barh(names, rest, left=left, height=0.72, color=look.panel, edgecolor=look.faint, linewidth=0.5, hatch="....", label="not attributed")
        for name, r in zip(names, shown, strict=True):
            axis.text(r.percent_of_clairvoyant + 1, name, f"{r.mean['decode_tokens_per_s']:.0f}", va="center", color=look.ink, fontsize=7.5)
        axis.set_title(place.label, color=look.ink, fontsize=9.5, loc="left")
        axis.margins(y=0.01)
    for axis in axes[-1]:
        axis.set_xlabel("decode throughput, % of clairvoyant (tokens/s at the bar)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8.5, labelcolor=look.ink, ncols=4, loc="lower left", bbox_to_anchor=(0.01, 0.0))
    figure.set_facecolor(look.page)
    figure.text(0.015, 1 - 0.1 / height, "The systems on one engine, modelled", ha="left", va="top", color=look.ink, fontsize=11.5)
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1 - 0.35 / height))
    save_figure(figure, path, dpi=100)
    plt.close(figure)
    return path
