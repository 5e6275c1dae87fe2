"""Apex's waves: the count as if there were slots for all, when they are taken, their order, and what stays resident."""

from dataclasses import replace

import pytest

from apexk import hardware
from apexk import policy as room
from apexk.policy import kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.types import CostPrior, InFlight, ModelShape, RouteView
from apexk.sim.demand import Demand, Step
from apexk.sim.run import simulate

#: a copy costs 1 ms, a pair on the CPU 0.1 ms, the GPU nothing
COSTS = AffineCosts(c0=0.0, a=0.0, b=0.1, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.0)
#: missed: 50 pairs are 5 ms on the CPU. p = 3 leaves 10 + 10 pairs: 2 ms against 3; p = 2 leaves 30: 3 ms against 2. Smallest p of the equals
LOADS = {0: 9, 1: 10, 2: 10, 3: 10, 4: 10, 5: 10}


def view(available, capacity=5, in_flight=None, loads=LOADS, resident=(0,), spec="apex", costs=COSTS):
    made = room.get(spec)
    made.start(ModelShape(1, 16, 2), capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0))
    tokens = sum(loads.values()) // 2
    return made, RouteView(0, 0, "prefill", tokens, loads, frozenset(resident), available, costs, in_flight, memory=made.recall(0, "prefill", loads))


def test_count_is_not_capped_by_the_slots():
    made, seen = view(available=0)
    plan = made.on_route(seen)
    assert len(plan.exact_fetch) == 2 and plan.cpu == (3, 4, 5)
    for spec in ("apex(waves=false)", "apex_paper"):
        made, seen = view(available=0, spec=spec)
        assert made.on_route(seen).exact_fetch == (), "no slot to copy into"
    made, seen = view(available=0, capacity=0)
    assert made.on_route(seen).exact_fetch == (), "without a pool there is none to stream through"


def test_no_waves_where_the_slots_do_not_limit():
    for available in (2, 3, 9):
        made, seen = view(available)
        assert made.on_route(seen) == made.on_route(replace(seen, memory=None)), "two copies are best, and fit"


@pytest.mark.parametrize(("launch", "copies"), [(1.2, 2), (1.3, 0)])
def test_waves_must_shorten_the_layer_by_a_tenth(launch, copies):
    """No copy: 5 ms on the CPU. Two in one wave: 2 ms of copies, the kernel's launch and the wave's; 4.4 ms are a tenth less, 4.6 ms are not."""
    made, seen = view(available=0, costs=replace(COSTS, g0=launch))
    assert len(made.on_route(replace(seen, resident_first=False)).exact_fetch) == copies


def test_held_experts_come_last_and_a_copy_under_way_first():
    """Five slots hold one expert: the heaviest of the pass. Of the three copied it is 1, unless that one is on its way."""
    loads = {0: 9, 1: 30, 2: 20, 3: 10, 4: 1}
    made, seen = view(available=0, loads=loads, capacity=5)
    assert made.holds(seen) == {1}
    assert made.on_route(seen).exact_fetch == (2, 1)
    made, seen = view(available=0, loads=loads, capacity=5, in_flight=InFlight(2, 0.5))
    assert made.on_route(seen).exact_fetch[0] == 2


@pytest.mark.parametrize("pool", [1, 4, 8, 12])
def test_a_long_pass_copies_in_waves_and_ends_sooner(pool):
    """16 experts of load 30 to 45, all active: every resident is in use, so without waves there is no free slot."""
    loads = {e: 30 + e for e in range(16)}
    demand = Demand(1, 16, 2, [Step(sum(loads.values()) // 2, "prefill", [loads], [None])] * 2, None, None, "a test")
    machine = hardware.load("pinned-link-c0.3")
    waves, plain = (simulate(demand, machine, name, pool, warmup=0) for name in ("apex", "apex(waves=false)"))
    assert waves.totals["prefill"].exact > plain.totals["prefill"].exact
    assert waves.totals["prefill"].step_ms < plain.totals["prefill"].step_ms
    left = waves.engine.slots[0].resident() | waves.engine.slots[0].loading()
    assert len(left) <= pool and set(range(16 - max(0, pool - 4), 16)) <= left


def test_invariants_without_waves():
    assert kit.check_policy(lambda: room.get("apex(waves=false)"), traces=120).copies > 0
