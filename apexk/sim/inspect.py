"""What a trace looks like: set sizes, skew, reuse, prediction recall, layer by layer."""

from __future__ import annotations

import numpy as np

from apexk.outputs import save_figure
from apexk.sim.demand import counts, step_slices
from apexk.sim.trace import Trace

SHARES = (0.125, 0.25, 0.375)  # pool sizes, of all experts, for which the CPU share is given


def stats(trace: Trace) -> dict:
    """Means over steps, per layer (`layers`) and over layers (`all`).

    activated: experts with a token; max_load: tokens of the heaviest; reuse: share of the load on experts that were also
    active in the step before; recall: share of the routed pairs that the prediction named for the same token; overlap:
    share of the load on experts that the prediction named for any token; jaccard: mean overlap of two tokens' sets;
    cpu_share_N: load outside the N most popular experts (needs profile_counts).
    """
    if not trace.tokens:
        raise ValueError(f"{trace.source} has no token")
    loads = np.stack([counts(trace.routed_experts[rows], trace.experts) for rows in step_slices(trace)])  # [S, L, E]
    total = loads.sum(-1)
    found = {"activated": (loads > 0).sum(-1).mean(0), "max_load": loads.max(-1).mean(0), "min_load": np.where(loads > 0, loads, 1 << 30).min(-1).mean(0)}
    if len(loads) > 1:
        found["reuse"] = ((loads[1:] * (loads[:-1] > 0)).sum(-1) / total[1:]).mean(0)
    if trace.predicted_experts is not None:
        guessed = np.stack([counts(trace.predicted_experts[rows], trace.experts) for rows in step_slices(trace)])
        overlap = ((loads * (guessed > 0)).sum(-1) / total).mean(0)
        hit = (trace.routed_experts[..., :, None] == trace.predicted_experts[..., None, :]).any(-1).mean((0, 2))
        overlap[0] = hit[0] = np.nan
        found |= {"overlap": overlap, "recall": hit}
    found["jaccard"] = _jaccard(trace)
    if trace.profile_counts is not None:
        order = np.argsort(-trace.profile_counts, axis=1, kind="stable")
        for share in SHARES:
            top = max(1, round(share * trace.experts))
            inside = np.take_along_axis(loads, order[None, :, :top].repeat(len(loads), 0), -1).sum(-1)
            found[f"cpu_share_{top}"] = (1 - inside / total).mean(0)
    return {
        "source": trace.source, "model": trace.meta.get("model"), "experts": trace.experts, "topk": trace.topk, "tokens": trace.tokens,
        "steps": len(loads), "all": {name: _mean(v) for name, v in found.items()},
        "layers": [{name: None if np.isnan(v[i]) else float(v[i]) for name, v in found.items()} for i in range(trace.layers)],
    }  # fmt: skip


def _mean(values: np.ndarray) -> float | None:
    real = values[~np.isnan(values)]
    return float(real.mean()) if real.size else None


def _jaccard(trace: Trace, pairs: int = 400) -> np.ndarray:
    """Mean Jaccard of the sets of neighbouring rows of one step, over at most `pairs` evenly spread pairs, `[L]`; NaN if there are none."""
    same = np.flatnonzero(trace.step[1:] == trace.step[:-1])
    if not same.size:
        return np.full(trace.layers, np.nan)
    chosen = same[np.linspace(0, same.size - 1, min(pairs, same.size)).astype(int)]
    a, b = trace.routed_experts[chosen], trace.routed_experts[chosen + 1]
    both = (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)
    return (both / (2 * trace.topk - both)).mean(0)


def draw(found: dict, path) -> None:
    """The per-layer figures as a picture. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [("experts and tokens a layer", ("activated", "max_load")), ("shares", ("reuse", "recall", "overlap", "jaccard")),
              ("load outside the most popular", tuple(k for k in found["all"] if k.startswith("cpu_share")))]
    panels = [(title, shown) for title, names in panels if (shown := [name for name in names if name in found["all"]])]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.3 * len(panels), 3.6), layout="constrained")
    for axis, (title, names) in zip(axes, panels, strict=True):
        for name, style in zip(names, ("-", "--", ":", "-."), strict=False):
            axis.plot([row[name] if row[name] is not None else np.nan for row in found["layers"]], style, label=name)
        axis.set(title=title, xlabel="MoE layer", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.suptitle(f"{found['source']}: {found['steps']} steps, top-{found['topk']} of {found['experts']}", fontsize=10)
    save_figure(figure, path, dpi=130)
    plt.close(figure)
