"""Reference rows: how far a policy is from one that knows more. None of them can run outside a simulation.

oracle_p      Apex whose transfer count minimises the layer's true time
foretold      Apex whose prediction of the next layer is its true demand
belady        Apex that evicts what is needed last
clairvoyant   all three; a heuristic, not a proof of a bound
all_resident  every expert on the GPU, no CPU path: a line to look at, which a policy that uses both may pass
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from apexk.hardware import Hardware
from apexk.policy.apex import Apex
from apexk.policy.base import Policy
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.scan import TIE_MS, by_load, most_copies, spill, transfer_ms
from apexk.policy.types import Costs, Phase, Plan, PolicyOptions, RouteView
from apexk.sim.demand import Demand, Step
from apexk.sim.named import REFERENCES


@dataclass(frozen=True)
class Reference:
    """What to run in place of a policy."""

    policy: Callable[[PolicyOptions], Policy]
    demand: Demand
    pool: int


def resolve(name: str, demand: Demand, machine: Hardware, pool: int) -> Reference:
    """The run behind a reference row of `pool` slots a layer."""
    if name == "oracle_p":
        return Reference(partial(OracleP, machine=machine), demand, pool)
    if name == "foretold":
        return Reference(Foretold, foretold(demand), pool)
    if name == "belady":
        return Reference(partial(Belady, uses=next_uses(demand)), demand, pool)
    if name == "clairvoyant":
        return Reference(partial(Clairvoyant, machine=machine, uses=next_uses(demand)), foretold(demand), pool)
    if name == "all_resident":
        return Reference(AllResident, demand, demand.experts)
    raise ValueError(f"unknown reference {name!r}; there are {', '.join(REFERENCES)}")


class OracleP(Apex):
    """Knows what work costs on `machine`, launches and waits included, and tries every count."""

    name = "oracle_p"
    source = "reference: true costs"

    def __init__(self, options: PolicyOptions, machine: Hardware):
        super().__init__(options, guard=False)
        cpu, link, gpu = machine.cpu, machine.link, machine.gpu
        self.machine = machine
        self.truth = AffineCosts(cpu.c0, cpu.a, cpu.b, link.s0, link.t1, gpu.g0, gpu.g1, gpu.g2, cpu.fixed_when_empty)

    def costs(self, phase: Phase) -> Costs:
        return self.truth

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        times = [true_paths(view, self.machine, here, missed, p) for p in range(most_copies(view, len(missed)) + 1)]
        best = min(max(pair) for pair in times)
        count = next(p for p, pair in enumerate(times) if max(pair) <= best + TIE_MS)
        plan = Plan(tuple(here), tuple(missed[:count]), tuple(missed[count:]), *times[count], tuple(times))
        return spill(view, self.in_waves(view, plan))


class Foretold(Apex):
    """Apex as it is; the true next-layer demand comes with its demand."""

    name = "foretold"
    source = "reference: true demand of the next layer"


class Belady(Apex):
    """Apex with the eviction that knows when each expert is needed next."""

    name = "belady"
    source = "reference: Belady's rule"

    def __init__(self, options: PolicyOptions, uses: list[list[list[int]]]):
        super().__init__(replace(options, evict="belady"))
        self.uses = uses


class Clairvoyant(OracleP):
    """True costs and Belady's rule; the true next-layer demand comes with its demand."""

    name = "clairvoyant"
    source = "reference: true costs, Belady's rule, true demand"

    def __init__(self, options: PolicyOptions, machine: Hardware, uses: list[list[list[int]]]):
        super().__init__(replace(options, evict="belady"), machine)
        self.uses = uses


class AllResident(Policy):
    """Every expert has a slot; nothing is copied and the CPU is not asked."""

    name = "all_resident"
    source = "reference: a GPU that holds every expert"
    speculates = False
    fetches = False
    waits_in_flight = False
    uses_cpu = False

    def on_route(self, view: RouteView) -> Plan:
        return Plan(tuple(sorted(view.loads)), (), ())


def true_paths(view: RouteView, machine: Hardware, here: list[int], missed: list[int], p: int) -> tuple[float, float]:
    """(CPU ms, GPU ms) that the modelled machine will take if the first `p` missed experts are copied."""
    loads = view.loads
    arriving, staying = missed[:p], missed[p:]
    resident_load, arriving_load = sum(loads[e] for e in here), sum(loads[e] for e in arriving)
    cpu = machine.cpu_ms(len(staying), sum(loads[e] for e in staying))
    landed = _landed_ms(view, machine, p) if p else 0.0
    if not view.resident_first:
        on_gpu = len(here) + p
        return cpu, landed + machine.gpu_ms(on_gpu, resident_load + arriving_load, True) if on_gpu else 0.0
    alone = machine.gpu_ms(len(here), resident_load, True) if here else 0.0
    return cpu, max(alone, landed) + machine.gpu_ms(p, arriving_load, not here) if p else alone


def _landed_ms(view: RouteView, machine: Hardware, copies: int) -> float:
    if view.in_flight is None:
        return transfer_ms(view, copies)
    running = view.in_flight.left * machine.copy_ms(speculative=True, first=True)
    return running + (machine.link.s0 + machine.link.t1 * (copies - 1) if copies > 1 else 0.0)


def next_uses(demand: Demand) -> list[list[list[int]]]:
    """`[layer][expert]` -> steps in which it is active, ascending."""
    uses: list[list[list[int]]] = [[[] for _ in range(demand.experts)] for _ in range(demand.layers)]
    for number, step in enumerate(demand.steps):
        for layer, loads in enumerate(step.loads):
            for expert in loads:
                uses[layer][expert].append(number)
    return uses


def foretold(demand: Demand) -> Demand:
    """The same demand, each layer predicted exactly."""
    steps = [
        Step(s.tokens, s.phase, s.loads, [None, *((n, {e: float(k) for e, k in n.items()}) for n in s.loads[1:])]) for s in demand.steps
    ]
    return replace(demand, steps=steps)
