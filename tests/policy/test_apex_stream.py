"""Apex with waves: the count as if there were slots for all, the order of the waves, and what stays resident."""

import pytest

from apexk import hardware
from apexk import policy as room
from apexk.policy import kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.scan import choose
from apexk.policy.types import CostPrior, InFlight, ModelShape, RouteView
from apexk.sim.demand import Demand, Step
from apexk.sim.run import simulate

#: a copy costs 1 ms, a pair on the CPU 0.1 ms, the GPU nothing
COSTS = AffineCosts(c0=0.0, a=0.0, b=0.1, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.0)
#: missed: 50 pairs are 5 ms on the CPU. p = 3 leaves 10 + 10 pairs: 2 ms against 3; p = 2 leaves 30: 3 ms against 2. Smallest p of the equals
LOADS = {0: 9, 1: 10, 2: 10, 3: 10, 4: 10, 5: 10}


def view(available, capacity=5, in_flight=None, loads=LOADS, resident=(0,)):
    made = room.get("apex_stream")
    made.start(ModelShape(1, 16, 2), capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0))
    tokens = sum(loads.values()) // 2
    return made, RouteView(0, 0, "prefill", tokens, loads, frozenset(resident), available, COSTS, in_flight, memory=made.recall(0, "prefill", loads))


def test_count_is_not_capped_by_the_slots():
    made, seen = view(available=0)
    plan = made.on_route(seen)
    assert len(plan.exact_fetch) == 2 and plan.cpu == (3, 4, 5)
    assert choose(seen).exact_fetch == (), "Apex has no slot to copy into"
    made, seen = view(available=0, capacity=0)
    assert made.on_route(seen).exact_fetch == (), "without a pool there is none to stream through"


def test_held_experts_come_last_and_a_copy_under_way_first():
    """Five slots hold one expert: the heaviest of the pass. Of the three copied it is 1, unless that one is on its way."""
    loads = {0: 9, 1: 30, 2: 20, 3: 10, 4: 1}
    made, seen = view(available=0, loads=loads, capacity=5)
    assert made.holds(seen) == {1}
    assert made.on_route(seen).exact_fetch == (2, 1)
    made, seen = view(available=0, loads=loads, capacity=5, in_flight=InFlight(2, 0.5))
    assert made.on_route(seen).exact_fetch[0] == 2


@pytest.mark.parametrize("pool", [1, 4, 8, 12])
def test_a_long_pass_copies_what_apex_cannot_and_ends_sooner(pool):
    """16 experts of load 30 to 45, all active: every resident is in use, so Apex has no free slot."""
    loads = {e: 30 + e for e in range(16)}
    demand = Demand(1, 16, 2, [Step(sum(loads.values()) // 2, "prefill", [loads], [None])] * 2, None, None, "a test")
    machine = hardware.load("pinned-link-c0.3")
    stream, plain = (simulate(demand, machine, name, pool, warmup=0) for name in ("apex_stream", "apex"))
    assert stream.totals["prefill"].exact > plain.totals["prefill"].exact
    assert stream.totals["prefill"].step_ms < plain.totals["prefill"].step_ms
    left = stream.engine.slots[0].resident() | stream.engine.slots[0].loading()
    assert len(left) <= max(pool, 4) and set(range(16 - max(0, pool - 4), 16)) <= left


def test_invariants():
    assert kit.check_policy(lambda: room.get("apex_stream"), traces=120).copies > 0
