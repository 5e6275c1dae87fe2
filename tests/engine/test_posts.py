"""Copies after a step that the next step waits for (`post_fetch(sync=true)`)."""

from dataclasses import replace

import pytest
from test_against_oracle import LAYERS, PAPER, TOPK, run_engine, trace
from test_ordering import Unreliable
from test_timeline import RULES, check_every_pair_once, check_lanes, check_slots

from apexk import hardware
from apexk.device.base import Rows
from apexk.device.checked import CheckedDevice
from apexk.device.virtual import VirtualDevice
from apexk.engine import layer as engine_layer
from apexk.engine.runtime import Engine, EngineSettings
from apexk.policy import get
from apexk.policy.types import CostPrior, ModelShape
from apexk.timeline.writer import Timeline

LINK = hardware.load("pinned-link")


@pytest.mark.parametrize("sync", ["true", "false"])
def test_the_next_step_waits(sync):
    """In ms: attention 0.1, CPU 1, merge 0; copies 1.5 + 0.5 set-up, one in each of two layers. A step without hits takes 2.2.

    Waited for, the copies end at 2.2 + 2 * 2 = 6.2, and the second step begins there and finds both. Else it routes at 2.3 and, a
    CPU path later, at 3.4: no copy has landed by then, the GPU waits for none, and the second step misses as the first did.
    """
    machine = replace(LINK, cpu=replace(LINK.cpu, c0=1.0, a=0.0, b=0.0), link=replace(LINK.link, s0=0.5, s_sp=0.5, t1=1.5),
                      gpu=replace(LINK.gpu, g0=0.0, g1=0.0, g2=0.0), layer=replace(LINK.layer, o_att=0.1, o_post=0.0, kappa=1.0))
    policy, timeline, shape = get(f"post_fetch(sync={sync})"), Timeline(None, keep=True), ModelShape(2, 24, TOPK)
    policy.start(shape, 1, CostPrior(1.0, 0.0, 0.0, 0.5, 1.5, 0.0, 0.0, 0.0), [list(range(24, 0, -1))] * 2)
    engine = Engine(shape, 1, CheckedDevice(VirtualDevice(machine, timeline, 1000)), policy, EngineSettings(), timeline, 1000)
    for _ in range(2):
        for layer in range(2):
            rows = Rows(tokens=4, topk=TOPK, loads={5: 4})
            engine_layer.join(engine, engine_layer.submit(engine, layer, rows, "decode"))
    begins = [row["start_ns"] for row in timeline.rows if row["kind"] == "attention" and (row["step"], row["layer"]) == (1, 0)]
    totals = engine.totals["decode"]
    if sync == "true":
        assert begins == [6_200_000] and (totals.hits, totals.exact, totals.bytes, totals.speculative) == (2, 2, 2000, 0)
        assert totals.step_ms == pytest.approx(6.2 + 0.2)
    else:
        assert begins == [2_200_000] and (totals.hits, totals.exact) == (0, 0)
        assert totals.step_ms == pytest.approx(4.4)


@pytest.mark.parametrize("failing", [0.0, 0.3])
@pytest.mark.parametrize("rules", RULES[:2])
def test_every_posted_expert_is_there_in_the_next_step(rules, failing):
    """On random passes: ordered, every pair once, and with copies that succeed what a step missed is resident in the next."""
    for seed in range(4):
        steps, popularity = trace(seed, 3)
        timeline = Timeline(None, keep=True)
        engine = run_engine("post_fetch(sync=true)", 24, steps, popularity, 3, timeline, LINK, rules,
                            lambda device: CheckedDevice(Unreliable(device, failing=failing)))
        check_every_pair_once(steps, timeline.rows)
        check_lanes(timeline.rows)
        if not failing:
            check_slots(engine, timeline.rows)
            assert all(set(steps[-1][0][layer]) <= engine.slots[layer].resident() for layer in range(LAYERS))


@pytest.mark.parametrize("policy", ["sa_only", "post_fetch", "post_fetch(sets=2)"])
@pytest.mark.parametrize("rules", RULES)
def test_a_policy_that_awaits_no_copy_never_keeps_the_gpu_waiting(policy, rules):
    """Its kernel of resident experts starts at the routing event, whatever is on its way."""
    kept = 0
    for seed in range(6):
        steps, popularity = trace(seed, 8)
        timeline = Timeline(None, keep=True)
        run_engine(policy, 6, steps, popularity, 8, timeline, PAPER, rules)
        routed = {(row["step"], row["layer"]): row["end_ns"] for row in timeline.rows if row["kind"] == "route"}
        kernels = [row for row in timeline.rows if row["kind"] == "gpu.resident"]
        assert all(row["start_ns"] == routed[row["step"], row["layer"]] for row in kernels)
        kept += sum(row["end_ns"] > routed[row["step"], row["layer"]] for row in timeline.rows if row["kind"] == "copy.spec")
    assert kept > 0 or rules.in_flight == "abort"


@pytest.mark.parametrize("policy", ["mira(every=1)", "mira(every=2, miss=cpu)"])
@pytest.mark.parametrize("rules", RULES[::3])
def test_nothing_is_asked_for_both_after_a_step_and_ahead(policy, rules):
    """A policy that does both: an expert that waits in the queue since the step before is not queued again by a prediction."""
    for seed in range(4):
        for capacity in (5, 9):
            steps, popularity = trace(seed, 3)
            timeline = Timeline(None, keep=True)
            engine = run_engine(policy, capacity, steps, popularity, 3, timeline, LINK, rules, lambda device: CheckedDevice(Unreliable(device)))
            check_every_pair_once(steps, timeline.rows)
            check_lanes(timeline.rows)
            check_slots(engine, timeline.rows)
