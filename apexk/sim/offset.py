"""The dense part of a layer, refitted to a trace so that no assignment gives the paper's throughput.

A layer takes `o_att + kappa*path + o_post`, and without assignment the path does not depend on o: one run tells what is
missing. The share of `o_att` in the sum stays as it was.
"""

from __future__ import annotations

from dataclasses import replace

from apexk.hardware import Hardware
from apexk.sim.demand import Demand
from apexk.sim.run import simulate

TARGET_TOKENS_PER_S = 72.44  # table3.none.tput, role fit; at batch 16 and pool 64
POOL = 64


def refit(demand: Demand, machine: Hardware, *, target: float = TARGET_TOKENS_PER_S, pool: int = POOL, warmup: int = 10) -> Hardware:
    """`machine` with `o_att` and `o_post` such that `no_assign` runs `demand` at `target` tokens/s.

    Raises ValueError where the paths alone take longer than the target allows.
    """
    sums = simulate(demand, machine, "no_assign", pool, warmup=warmup).totals["decode"]
    if not sums.steps:
        raise ValueError(f"{demand.source} has no decode step to refit the layer offset on")
    wanted_ms = 1e3 * sums.tokens / target
    old = machine.layer.o_att + machine.layer.o_post
    new = old + (wanted_ms - sums.step_ms) / sums.layers
    if new <= 0:
        raise ValueError(f"no layer offset gives {target} tokens/s on {demand.source}: the paths alone take {sums.step_ms / sums.layers - old:.3f} ms")
    share = machine.layer.o_att / old if old else 0.8
    return replace(machine, layer=replace(machine.layer, o_att=share * new, o_post=(1 - share) * new))
