"""FlexGen's policy search: what percent of weights, cache and activations lies on the GPU, and how many micro-batches share
one pass over the weights. Source: its public code and paper; the grid stands for its linear program, attention is the GPU's.

Schedule of a layer: the next one's missing weights are copied while all micro-batches run this one, so a layer takes the
longer of the link and the GPU. Experts count as one block: a micro-batch that uses few still has them all moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .model import WORD, Choice, Load, Machine, Model, activations, active, best, dense_s, experts_s, kv_layer, powers

TENTHS = [n / 10 for n in range(11)]
QUARTERS = [n / 4 for n in range(5)]


def plan(model: Model, machine: Machine, load: Load, most: int = 4096) -> Choice:
    """The tuple of most tokens/s for at most `most` requests. Raises `NoRoom`."""
    return best("flexgen", machine, _candidates(model, machine, load, most))


def _candidates(model: Model, machine: Machine, load: Load, most: int) -> Iterator[Callable[[], Choice]]:
    for micro in powers(most):
        for number in powers(most // micro):
            for weights in TENTHS:
                for cache in QUARTERS:
                    for rows in (0.0, 1.0):
                        yield partial(choice, model, machine, load, micro, number, weights, cache, rows)


def choice(model: Model, machine: Machine, load: Load, micro: int, number: int, weights: float, cache: float, rows: float) -> Choice:
    """One point of the grid: shares of `weights`, `cache` and activation `rows` on the GPU."""
    batch, layer = micro * number, model.experts * model.expert_bytes
    kv, hidden = kv_layer(model, batch, load.context), batch * model.hidden * WORD
    link = ((1 - weights) * layer + (1 - cache) * kv + 2 * (1 - rows) * hidden) / machine.link_bps
    one = dense_s(model, machine, micro) + kv / number / machine.gpu_bps
    one += experts_s(model, active(model.shares(), model.topk, micro), micro * model.topk, machine.gpu_bps, machine.gpu_flops)
    seconds = {"link": link, "gpu": number * one}
    stored = kv_layer(model, batch, load.longest) * model.layers
    gpu = {"dense": model.dense_bytes, "experts": weights * layer * model.layers, "two layers under way": 2 * (1 - weights) * layer,
           "cache": cache * stored + (1 - cache) * 2 * stored / model.layers / number, "activations": activations(model, load, micro, round(rows * batch))}  # fmt: skip
    host = {"experts": layer * model.layers, "cache": (1 - cache) * stored, "activations": (1 - rows) * hidden}
    return Choice("flexgen", batch, micro, {"weights": weights, "cache": cache, "activations": rows}, seconds, gpu, host,
                  batch / (model.layers * max(seconds.values())))  # fmt: skip
