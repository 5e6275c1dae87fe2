"""The pictures beside the layer timeline: how the two paths balance, what copies bring, which experts stay, and how far
estimates are from what happened. Each function returns False where the run has no data for it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from apexk.outputs import save_figure
from apexk.timeline import Recording

from .layers import LayerLine, lines_of
from .style import clock, headline, legend, plain, theme
from .tables import MS, by_step

SIZE = (10.0, 4.4)
MOST_TOLD_APART = 64  # columns of a heat map


def path_balance(recording: Recording, path: str | os.PathLike, *, dark: bool = False) -> bool:
    """Mean CPU path, GPU path and window of each layer: a dot each, the gap between the paths as a line."""
    phase, groups = _main_phase(recording)
    lines = _by_layer(groups)
    if not any(line.gpu_path_ns or line.cpu_path_ns for group in lines.values() for line in group):
        return False
    look, layers = theme(dark), sorted(lines)
    cpu = [fmean(line.cpu_path_ns for line in lines[k]) / MS for k in layers]
    gpu = [fmean(line.gpu_path_ns or 0 for line in lines[k]) / MS for k in layers]
    window = [fmean(line.critical_ns for line in lines[k]) / MS for k in layers]
    figure, axes = _figure()
    axes.vlines(layers, cpu, gpu, color=look.faint, linewidth=1.2, alpha=0.7, zorder=1)
    half = 0.32
    axes.hlines(window, [k - half for k in layers], [k + half for k in layers], color=look.ink, linewidth=1.6, label="window: routing known to merge", zorder=2)
    axes.plot(layers, cpu, "s", color=look.faces["host.ffn"], markersize=7, label="CPU path", zorder=3)
    axes.plot(layers, gpu, "o", color=look.faces["gpu.resident"], markersize=7, label="GPU path", zorder=3)
    axes.set(xlabel="MoE layer", ylabel="ms, mean of the steps", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
    axes.set_ylim(0, max(window + cpu + gpu) * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, look, path, f"CPU and GPU path of each layer, {len(groups)} {phase} steps", recording)
    return True


def transfers(recording: Recording, path: str | os.PathLike, *, dark: bool = False) -> bool:
    """Copies a step above, hit rate below, over the steps of the main phase: a prefill's copies would dwarf a decode step's."""
    phase, groups = _main_phase(recording)
    steps = {group[0].step: group for group in groups}
    if len(steps) < 2:
        return False
    look, x = theme(dark), sorted(steps)
    exact = [sum(line.n_exact for line in steps[s]) for s in x]
    used = [sum(line.spec_used for line in steps[s]) for s in x]
    spec = [sum(line.n_spec for line in steps[s]) for s in x]
    active = [sum(line.n_active or 0 for line in steps[s]) for s in x]
    rates = [sum(line.n_resident or 0 for line in steps[s]) / n if n else None for s, n in zip(x, active, strict=True)]
    known = [(s, rate) for s, rate in zip(x, rates, strict=True) if rate is not None]
    figure, both = plt.subplots(2 if known else 1, 1, sharex=True, figsize=(SIZE[0], 5.2 if known else SIZE[1]), dpi=150, squeeze=False, height_ratios=[3, 2] if known else None)
    axes = both[0, 0]
    series = (("exact", exact, "copy.exact", "-"), ("speculative", spec, "copy.spec", "-"), ("of these used", used, "copy.spec", ":"))
    for label, values, kind, dash in series:
        if any(values):
            axes.step(x, values, where="mid", color=look.faces[kind], linestyle=dash, linewidth=1.7, label=label)
    axes.set(ylabel="expert copies a step")
    axes.set_ylim(0, None)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if known:
        lower = both[1, 0]
        lower.step(*zip(*known, strict=True), where="mid", color=look.faces["gpu.resident"], linewidth=1.7)
        lower.set(ylabel="hit rate", ylim=(0, 1))
        plain(figure, lower, look)
    both[-1, 0].set(xlabel="step", xlim=(x[0] - 0.5, x[-1] + 0.5))
    both[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, look, path, "Expert copies" + (" and hits" if known else "") + f" over the {phase} steps", recording)
    return True


def residency(recording: Recording, path: str | os.PathLike, *, dark: bool = False) -> bool:
    """Share of the steps at whose routing an expert was in the pool: a row a layer, a column an expert. More experts than can be told
    apart are sorted in each layer, so that the row shows how many stay and how many come and go."""
    phase, _ = _main_phase(recording)
    seen, counts = defaultdict(int), defaultdict(lambda: defaultdict(int))
    most = -1
    for row in recording.rows:
        if row["kind"] == "plan" and row["phase"] == phase:
            seen[row["layer"]] += 1
            inputs = row["decision"]["inputs"]
            most = max([most, *row["experts"], *inputs["resident"]])
            for expert in inputs["resident"]:
                counts[row["layer"]][expert] += 1
    if not any(counts.values()):
        return False
    look, layers = theme(dark), sorted(seen)
    share = np.array([[counts[layer][e] / seen[layer] for e in range(most + 1)] for layer in layers])
    label = "expert"
    if most >= MOST_TOLD_APART:
        share, label = -np.sort(-share, axis=1), "experts of the layer, the most resident first"
    height = min(7.5, 2.1 + 0.28 * len(layers))
    figure, axes = plt.subplots(figsize=(SIZE[0], height), dpi=150)
    image = axes.imshow(share, aspect="auto", cmap=look.map, vmin=0, vmax=1, interpolation="nearest", extent=(-0.5, most + 0.5, len(layers) - 0.5, -0.5))
    axes.set(xlabel=label, ylabel="MoE layer")
    if len(layers) <= 12:
        axes.set_yticks(range(len(layers)), layers)
        axes.hlines(np.arange(len(layers) - 1) + 0.5, -0.5, most + 0.5, color=look.page, linewidth=1.5)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=6 * height)
    bar.set_label("share of steps in the pool", color=look.ink, fontsize=8.5)
    bar.ax.tick_params(colors=look.faint, labelcolor=look.ink, labelsize=8, length=2)
    bar.outline.set_visible(False)
    _finish(figure, axes, look, path, f"Who is in the pool when routing is known, {phase}", recording, grid=None, key=False)
    return True


def estimates(recording: Recording, path: str | os.PathLike, *, dark: bool = False) -> bool:
    """What the policy expected of each path against what the layer took, a dot a layer and step."""
    planned = {(row["step"], row["layer"]): row["decision"]["choice"] for row in recording.rows if row["kind"] == "plan"}
    phase, groups = _main_phase(recording)
    pairs = {"cpu": [], "gpu": []}
    for line in (line for group in groups for line in group):
        choice = planned.get((line.step, line.layer), {})
        for side, took in (("cpu", line.cpu_path_ns), ("gpu", line.gpu_path_ns)):
            expected = choice.get(f"est_{side}_ms")
            if expected and took:
                pairs[side].append((expected, took / MS))
    if not pairs["cpu"] and not pairs["gpu"]:
        return False
    look = theme(dark)
    figure, axes = plt.subplots(figsize=(6.4, 6.0), dpi=150)
    top = 1.05 * max(value for side in pairs.values() for pair in side for value in pair)
    axes.plot([0, top], [0, top], color=look.faint, linewidth=1.1, zorder=1)
    for side, kind, marker in (("cpu", "host.ffn", "s"), ("gpu", "gpu.resident", "o")):
        if pairs[side]:
            error = float(np.median([took / expected - 1 for expected, took in pairs[side]]))
            label = f"{side.upper()} path, median {100 * error:+.1f} %".replace("-0.0", "+0.0")
            axes.plot(*zip(*pairs[side], strict=True), marker, color=look.faces[kind], markersize=4, alpha=0.45, markeredgewidth=0, label=label)
    axes.set(xlabel="expected by the policy, ms", ylabel="ms that it took", xlim=(0, top), ylim=(0, top), aspect="equal")
    _finish(figure, axes, look, path, f"Estimated and actual paths, {phase}", recording, grid="both", inside="upper left")
    return True


PICTURES: dict[str, Callable] = {"path_balance": path_balance, "transfers": transfers, "residency": residency, "estimates": estimates}


def _main_phase(recording: Recording) -> tuple[str, list[list[LayerLine]]]:
    """Decode where there is any."""
    lines = lines_of(recording)
    return next(((phase, groups) for phase in ("decode", "prefill") if (groups := by_step(lines, phase, 0))), ("decode", []))


def _by_layer(groups: list[list[LayerLine]]) -> dict[int, list[LayerLine]]:
    found = defaultdict(list)
    for group in groups:
        for line in group:
            found[line.layer].append(line)
    return found


def _figure():
    return plt.subplots(figsize=SIZE, dpi=150)


def _finish(figure, axes, look, path, title, recording, *, grid="y", key=True, inside=None) -> None:
    plain(figure, axes, look, grid=grid)
    if key and inside:
        legend(axes, look, loc=inside)
    elif key:
        legend(axes, look, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderaxespad=0.3)
    figure.tight_layout(rect=(0, 0.03, 1, 0.945))
    headline(figure, look, title, _about(recording), left=axes.get_position().x0)
    save_figure(figure, path, facecolor=look.page)
    plt.close(figure)


def _about(recording: Recording) -> str:
    config = recording.header["config"] if isinstance(recording.header["config"], dict) else {}
    run = ", ".join(f"{name} {config[name]}" for name in ("policy", "pool") if config.get(name) is not None)
    if config.get("payload", "plain") != "plain":
        run += f", {config['payload']} copies (lossy)"
    return "; ".join(filter(None, (run, clock(recording))))
