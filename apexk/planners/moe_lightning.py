"""MoE-Lightning's search by a hierarchical roofline: attention on the CPU or the GPU, the share of weights that stays on the
GPU, batch and micro-batch. Source: the paper's summary; experts run on the GPU only, as in the paper's own choice for decode.

In its pipeline the CPU's attention of one micro-batch, the GPU's experts of another and the pages of the next layer's
weights run at once, so a layer takes the longest of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .model import WORD, Choice, Load, Machine, Model, activations, active, best, dense_s, experts_s, kv_layer, powers

TENTHS = [n / 10 for n in range(11)]
QKV_ROWS = 4  # hidden-sized rows that cross the link for a token whose attention is the CPU's: q, k, v there, the result back


def plan(model: Model, machine: Machine, load: Load, most: int = 4096) -> Choice:
    """The point of most tokens/s for at most `most` requests. Raises `NoRoom`."""
    return best("moe_lightning", machine, _candidates(model, machine, load, most))


def _candidates(model: Model, machine: Machine, load: Load, most: int) -> Iterator[Callable[[], Choice]]:
    for micro in powers(most):
        for number in powers(most // micro):
            for weights in TENTHS:
                for on_cpu in (0.0, 1.0):
                    yield partial(choice, model, machine, load, micro, number, weights, on_cpu)


def choice(model: Model, machine: Machine, load: Load, micro: int, number: int, weights: float, on_cpu: float) -> Choice:
    """One point: share of `weights` on the GPU, attention and cache `on_cpu` (1) or on the GPU (0)."""
    batch, layer = micro * number, model.experts * model.expert_bytes
    kv = kv_layer(model, batch, load.context)
    link = ((1 - weights) * layer + on_cpu * QKV_ROWS * batch * model.hidden * WORD) / machine.link_bps
    one = dense_s(model, machine, micro) + (1 - on_cpu) * kv / number / machine.gpu_bps
    one += experts_s(model, active(model.shares(), model.topk, micro), micro * model.topk, machine.gpu_bps, machine.gpu_flops)
    seconds = {"link": link, "gpu": number * one, "cpu": on_cpu * kv / machine.cpu_bps}
    stored = kv_layer(model, batch, load.longest) * model.layers
    gpu = {"dense": model.dense_bytes, "experts": weights * layer * model.layers, "two layers under way": 2 * (1 - weights) * layer,
           "cache": (1 - on_cpu) * stored, "activations": activations(model, load, micro, batch)}  # fmt: skip
    host = {"experts": layer * model.layers, "cache": on_cpu * stored}
    return Choice("moe_lightning", batch, micro, {"weights": weights, "attention on the CPU": on_cpu}, seconds, gpu, host,
                  batch / (model.layers * max(seconds.values())))  # fmt: skip
