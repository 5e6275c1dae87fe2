"""CoX-MoE's orchestration: batch, attention micro-batch, share of attention on the CPU, and how many experts the GPU's stratum
has. Source: the abstract; the cost model and the grid are ours.

Strata are fixed: the most popular experts of each layer on the GPU, the others on the CPU, no weight moves. Expert execution
is coalesced: attention runs by micro-batch, experts once on the whole batch, so each expert's weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .model import WORD, Choice, Load, Machine, Model, activations, active, best, dense_s, experts_s, kv_layer, powers

QUARTERS = [n / 4 for n in range(5)]
STRATA = 16  # sizes of the GPU's stratum that are tried: each sixteenth of the experts


def plan(model: Model, machine: Machine, load: Load, most: int = 4096, attention_on_cpu: bool = False) -> Choice:
    """The point of most tokens/s for at most `most` requests. Raises `NoRoom`.

    Without `attention_on_cpu` the share on the CPU is 0: apexk runs no attention there.
    """
    return best("cox_moe", machine, _candidates(model, machine, load, most, attention_on_cpu))


def _candidates(model: Model, machine: Machine, load: Load, most: int, attention_on_cpu: bool) -> Iterator[Callable[[], Choice]]:
    sizes = sorted({round(n * model.experts / STRATA) for n in range(STRATA + 1)})
    for batch in powers(most):
        for micro in powers(batch):
            for slots in sizes:
                for share in QUARTERS if attention_on_cpu else (0.0,):
                    yield partial(choice, model, machine, load, batch, micro, slots, share)


def choice(model: Model, machine: Machine, load: Load, batch: int, micro: int, slots: int, share: float, coalesced: bool = True) -> Choice:
    """One point; `share` of the requests' attention and cache on the CPU. Not `coalesced`: experts run by micro-batch too."""
    layer, number, shares = model.experts * model.expert_bytes, batch / micro, model.shares()
    kv, hidden = kv_layer(model, batch, load.context), batch * model.hidden * WORD
    passes, tokens = (1, batch) if coalesced else (number, micro)
    covered = sum(shares[:slots])
    on_gpu = experts_s(model, active(shares[:slots], model.topk, tokens), tokens * model.topk * covered, machine.gpu_bps, machine.gpu_flops)
    on_cpu = experts_s(model, active(shares[slots:], model.topk, tokens), tokens * model.topk * (1 - covered), machine.cpu_bps, machine.cpu_flops)
    crossing = (2 * hidden if slots < model.experts else 0) + share * 4 * hidden
    seconds = {"gpu": number * dense_s(model, machine, micro) + (1 - share) * kv / machine.gpu_bps + passes * on_gpu,
               "cpu": share * kv / machine.cpu_bps + passes * on_cpu, "link": crossing / machine.link_bps}  # fmt: skip
    stored = kv_layer(model, batch, load.longest) * model.layers
    gpu = {"dense": model.dense_bytes, "experts": slots * model.expert_bytes * model.layers, "cache": (1 - share) * stored, "activations": activations(model, load, micro, batch)}
    host = {"experts": layer * model.layers, "cache": share * stored}
    return Choice("cox_moe", batch, micro, {"slots": slots, "attention on the CPU": share}, seconds, gpu, host, batch / (model.layers * max(seconds.values())))
