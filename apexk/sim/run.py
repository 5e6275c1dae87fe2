"""One run: a policy on the engine, over a demand, timed by a hardware file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields

from apexk.config import ApexConfig, policy_options
from apexk.device.base import Rows
from apexk.device.virtual import VirtualDevice
from apexk.engine import layer as engine_layer
from apexk.engine.runtime import Engine, EngineSettings
from apexk.engine.totals import Totals
from apexk.hardware import Hardware
from apexk.policy import registry
from apexk.policy.base import Policy
from apexk.policy.types import CostPrior, ModelShape
from apexk.sim.demand import Demand
from apexk.sim.gpus import SeveralGpus
from apexk.timeline.writer import Timeline

log = logging.getLogger("apexk.sim")
BYTES_PER_EXPERT = 6291456  # where a hardware file does not say


@dataclass
class Run:
    """What a run came to: sums after the warm-up by phase, and how fast the simulation itself was."""

    engine: Engine
    totals: dict[str, Totals]
    layer_steps: int
    seconds: float

    def report(self) -> dict:
        """Sums by phase (see `apexk.engine.totals`), phases without a step left out."""
        return {phase: t.report() for phase, t in self.totals.items() if t.steps}


def prior_of(machine: Hardware) -> CostPrior:
    """Cost models start from what the hardware file says."""
    cpu, link, gpu = machine.cpu, machine.link, machine.gpu
    return CostPrior(cpu.c0, cpu.a, cpu.b, link.s0, link.t1, gpu.g0, gpu.g1, gpu.g2, cpu.fixed_when_empty)


def simulate(demand: Demand, machine: Hardware, policy: str | Callable[..., Policy], pool: int, *, warmup: int = 10, config: dict | None = None,
             timeline: Timeline | None = None, popularity: Sequence[Sequence[float]] | None = None, seed: int = 0,
             prior: CostPrior | None = None, watch: Callable[[Engine, int, int], None] | None = None) -> Run:
    """Runs `demand` under `policy` (a name, or a callable that makes one from options) with `pool` slots a layer, on each GPU where `config` says
    several (`gpus`).

    The first `warmup` steps are run and not counted. `config` holds settings of `ApexConfig` (cost, resident_first, ...).
    Cost models start from the hardware file's own costs, or from `prior`. `watch(engine, step, layer)` is called after each
    layer.
    """
    if not 0 <= pool <= demand.experts:
        raise ValueError(f"pool is {pool} slots per layer, but a layer has {demand.experts} experts: wanted 0..{demand.experts}")
    if warmup >= len(demand.steps):
        raise ValueError(f"a warm-up of {warmup} steps leaves none of the trace's {len(demand.steps)} ({demand.source})")
    settings = ApexConfig(**(config or {})).settings(machine)
    options = policy_options(settings)
    chosen = registry.get(policy, options) if isinstance(policy, str) else policy(options)
    reach = 1 + len(demand.steps[0].farther)
    if getattr(chosen, "predictor", None) is not None and chosen.look_ahead > reach:
        raise ValueError(f"{chosen.name} asks its predictor {chosen.look_ahead} layers ahead, the predictions of {demand.source} reach {reach}: "
                         "record the trace under a policy that looks as far (apexk trace record --policy mira)")
    if chosen.speculates and chosen.look_ahead > reach:
        log.warning("%s looks %d layers ahead, the predictions of %s reach %d", chosen.name, chosen.look_ahead, demand.source, reach)
    shape, gpus = ModelShape(demand.layers, demand.experts, demand.topk), settings["gpus"].value
    further = chosen.further_slots(shape, pool, gpus) if gpus > 1 else 0
    pool = min(demand.experts, gpus * (pool - further))  # slots a layer that the engine knows of
    chosen.start(shape, pool, prior or prior_of(machine), demand.popularity if popularity is None else popularity, seed)
    timeline = timeline or Timeline(None)
    moved = machine.model.get("bytes_per_expert", BYTES_PER_EXPERT)
    device = VirtualDevice(machine, timeline, moved) if gpus == 1 else SeveralGpus(machine, timeline, moved, gpus=gpus, policy=chosen, further=further)
    rules = EngineSettings(**{f.name: settings[f.name].value for f in fields(EngineSettings) if f.name in settings})
    engine = Engine(shape, pool, device, chosen, rules, timeline, moved)

    began = time.process_time()
    before = {}
    for number, step in enumerate(demand.steps):
        if number == warmup:
            before = {phase: copy(t) for phase, t in engine.totals.items()}
            if gpus > 1:
                device.forget()
        for layer in range(demand.layers):
            predicted = step.seen_from(layer, chosen.look_ahead)
            rows = Rows(tokens=step.tokens, topk=demand.topk, loads=step.loads[layer], predicted=predicted)
            if chosen.defers:
                rows.places = step.places(layer)
            engine_layer.join(engine, engine_layer.submit(engine, layer, rows, step.phase))
            if watch is not None:
                watch(engine, number, layer)
    seconds = time.process_time() - began
    return Run(engine, {p: difference(t, before[p]) for p, t in engine.totals.items()}, demand.layers * len(demand.steps), seconds)


def difference(after: Totals, before: Totals) -> Totals:
    return Totals(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in fields(Totals)})
