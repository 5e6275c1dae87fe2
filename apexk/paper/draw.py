"""Pictures of the comparison. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from apexk.outputs import save_figure
from apexk.paper.measure import Get
from apexk.paper.motivation import stages
from apexk.paper.results import BATCHES, by_batch
from apexk.paper.rows import PaperRow

OURS, PAPER = "#0b5fa5", "#c9ced6"


def draw(name: str, rows: list[PaperRow], get: Get, folder: Path) -> Path | None:
    """Draws one figure into `folder`; None where it has nothing to draw."""
    path = folder / f"{name}.png"
    if name == "fig1":
        _stacked(stages(get), path)
    elif name in ("fig5", "fig6"):
        _lines(by_batch(get, "prefill" if name == "fig5" else "decode"), name, path)
    else:
        pairs = [r for r in rows if r.figure == name and _number(r.ours) and _number(r.paper)]
        if not pairs:
            return None
        _pairs(pairs, name, path)
    return path


def _pairs(rows: list[PaperRow], name: str, path: Path) -> None:
    """Ours beside the paper's; each unit has its own panel, missed bands are marked."""
    units = list(dict.fromkeys(r.unit for r in rows))
    figure, axes = plt.subplots(1, len(units), figsize=(max(4.0, 0.55 * len(rows) + 2 * len(units)), 4), layout="constrained", squeeze=False)
    for axis, unit in zip(axes[0], units, strict=True):
        chosen = [r for r in rows if r.unit == unit]
        place = range(len(chosen))
        axis.bar([x - 0.2 for x in place], [r.paper for r in chosen], 0.4, label="paper", color=PAPER)
        axis.bar([x + 0.2 for x in place], [r.ours for r in chosen], 0.4, label="ours, modelled", color=OURS)
        labels = [r.id.removeprefix("derived.").partition(".")[2] + (" (missed)" if r.status == "missed" else "") for r in chosen]
        axis.set_xticks(list(place), labels, rotation=60, ha="right", fontsize=8)
        axis.set_ylabel(unit)
        axis.legend(fontsize=8)
    figure.suptitle(name)
    _save(figure, path)


def _lines(found: dict[str, list[float]], name: str, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for (model, gains), style in zip(found.items(), ("-o", "--s", ":^"), strict=True):
        axis.plot([str(b) for b in BATCHES], gains, style, label=model)
    axis.set(title=f"{name}: Apex over the strongest baseline, modelled", xlabel="batch", ylabel="gain, %")
    axis.axhline(0, color="#888888", linewidth=0.8)
    axis.legend(fontsize=8)
    _save(figure, path)


def _stacked(found: dict[str, dict[str, float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    parts = ("CPU path", "transfer", "GPU kernels")
    for shift, (part, hatch) in zip((-0.27, 0.0, 0.27), zip(parts, ("", "//", ".."), strict=True), strict=True):
        axis.bar([x + shift for x in range(len(found))], [stage[part] for stage in found.values()], 0.25, label=part, hatch=hatch)
    axis.set_xticks(range(len(found)), list(found))
    axis.set(title="fig1: stages of a layer, modelled", ylabel="ms")
    axis.legend(fontsize=8)
    _save(figure, path)


def _save(figure, path: Path) -> None:
    save_figure(figure, path, dpi=130)
    plt.close(figure)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
