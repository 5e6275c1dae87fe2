"""KTransformers: placements, the threshold, and which experts a streamed pass leaves resident."""


import random

import pytest

from apexk import hardware
from apexk import policy as room
from apexk.policy import kit
from apexk.policy.types import CostPrior, ModelShape, RouteView
from apexk.sim.demand import Demand, Step
from apexk.sim.run import simulate

PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)


def started(spec, capacity=4, experts=16):
    made = room.get(spec)
    made.start(ModelShape(2, experts, 2), capacity, PRIOR, popularity=[[e % 7 for e in range(experts)]] * 2)
    return made


@pytest.mark.parametrize("spec", ["kt_static(stream_tokens=8)", "kt_dynamic(stream_tokens=8)", "kt_static(placement=random)"])
def test_invariants(spec):
    assert kit.check_policy(lambda: room.get(spec), traces=120).layers == 120 * 9


def test_placements():
    assert started("kt_static").initial(1) == (0, 1, 2, 3)
    assert started("kt_static(placement=frequency)").initial(1) == (6, 13, 5, 12)
    drawn = [started("kt_static(placement=random)").initial(layer) for layer in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1] and all(len(set(d)) == 4 for d in drawn)
    for bad, said in (("placement=best", "there are uniform"), ("stream_tokens=-1", "whole number"), ("stream_tokens=x", "whole number")):
        with pytest.raises(ValueError, match=said):
            room.get(f"kt_static({bad})")


@pytest.mark.parametrize(("tokens", "streams"), [(7, False), (8, True)])
@pytest.mark.parametrize("name", ["kt_static", "kt_dynamic"])
def test_the_threshold_is_in_tokens(name, tokens, streams):
    made = started(f"{name}(stream_tokens=8)")
    loads = {0: tokens, 5: tokens}
    view = RouteView(0, 0, "prefill", tokens, loads, frozenset({0}), 3, made.costs("prefill"), memory=made.recall(0, "prefill", loads))
    plan = made.on_route(view)
    assert plan.gpu_resident == (0,) and (plan.exact_fetch, plan.cpu) == (((5,), ()) if streams else ((), (5,)))


def run(spec, steps, pool, experts=16):
    demand = Demand(2, experts, 2, [Step(tokens, phase, [loads] * 2, [None] * 2) for tokens, phase, loads in steps], None, None, "a test")
    left = []
    simulate(demand, hardware.load("pinned-link"), spec, pool, warmup=0,
             watch=lambda engine, step, layer: left.append(engine.slots[layer].resident() | engine.slots[layer].loading()))
    return left


def test_a_streamed_pass_leaves_what_it_used_most():
    """16 experts of load 1..16 through 8 slots: the stream's 4 slots end with some, the other 4 hold the heaviest."""
    heavy = {e: e + 1 for e in range(16)}
    tokens = sum(heavy.values()) // 2
    left = run("kt_dynamic(stream_tokens=8)", [(tokens, "prefill", heavy), (1, "decode", {0: 1, 1: 1})], pool=8)
    assert all({12, 13, 14, 15} <= residents and len(residents) == 8 for residents in left)
    assert left[2:] == left[:2], "decode moves nothing"


def test_a_static_placement_is_the_same_after_a_streamed_pass():
    heavy = {e: e + 1 for e in range(16)}
    left = run("kt_static(stream_tokens=8)", [(68, "prefill", heavy), (1, "decode", {0: 1, 1: 1})], pool=6)
    assert left == [frozenset(range(6))] * 4


@pytest.mark.parametrize(("pool", "seed"), [(p, s) for p in (0, 3, 4, 5, 9, 16) for s in range(3)])
def test_streams_through_any_pool(pool, seed):
    """Every pair is computed once, whatever the pool; the simulator's engine refuses anything else."""
    draw = random.Random(seed)
    steps = []
    for _ in range(4):
        loads = {e: draw.randint(1, 9) for e in draw.sample(range(16), draw.randint(2, 16))}
        loads[min(loads)] += sum(loads.values()) % 2
        steps.append((sum(loads.values()) // 2, "prefill", loads))
    for spec in ("kt_dynamic(stream_tokens=4)", "kt_static(stream_tokens=4)"):
        assert all(len(r) <= max(pool, 4) for r in run(spec, steps, pool))
