"""Policies that look several layers ahead: what they are told, and what becomes of the copies that they ask for."""

from dataclasses import replace

import pytest
from test_against_oracle import LAYERS, PAPER, TOPK, trace

from apexk.device.base import Rows
from apexk.device.checked import CheckedDevice
from apexk.device.virtual import VirtualDevice
from apexk.engine import layer as engine_layer
from apexk.engine.runtime import Engine, EngineSettings
from apexk.hardware import load
from apexk.policy import Plan, Policy
from apexk.policy.ranker import speculative_order
from apexk.policy.types import CostPrior, ModelShape
from apexk.timeline.writer import Timeline

PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)


class Far(Policy):
    """Runs what is resident on the GPU and the rest on the CPU; copies what is predicted for three layers."""

    name, source, speculates, fetches, waits_in_flight, look_ahead = "far", "a test", True, False, False, 3

    def start(self, *args, **more):
        super().start(*args, **more)
        self.told = []

    def on_route(self, view):
        return Plan(tuple(e for e in view.loads if e in view.resident), (), tuple(e for e in view.loads if e not in view.resident))

    def on_predict(self, layer_next, prediction, resident):
        queue = speculative_order(prediction, resident)
        self.told.append((layer_next, prediction.loads))
        return queue


class Listening:
    """Keeps the queues that the engine hands over."""

    def __init__(self, inner):
        self.inner, self.queues = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def speculate(self, at, queue, after=()):
        self.queues.append((at, list(queue)))
        self.inner.speculate(at, queue, after)


def run(steps, capacity, rules=None, machine=PAPER, experts=24):
    """One pass after the other. `steps[step]` holds the layers' loads, and for each layer what is predicted in it for all layers."""
    layers = len(steps[0][0])
    policy, timeline, shape = Far(), Timeline(None, keep=True), ModelShape(layers, experts, TOPK)
    policy.start(shape, capacity, PRIOR, [list(range(experts, 0, -1))] * layers)
    device = Listening(CheckedDevice(VirtualDevice(machine, timeline, 1000)))
    engine = Engine(shape, capacity, device, policy, rules or EngineSettings(), timeline, 1000)
    for loads, guesses in steps:
        for layer, (layer_loads, guess) in enumerate(zip(loads, guesses, strict=True)):
            rows = Rows(tokens=4, topk=TOPK, loads=layer_loads, predicted=[(n, {e: 1.0 for e in n}) for n in guess[layer + 1 :]])
            engine_layer.join(engine, engine_layer.submit(engine, layer, rows, "decode"))
    return engine, device, timeline.rows


def random_steps(seed):
    """The same guess from every layer before."""
    return [(loads, [[{e: n for e, (n, _) in layer.items()} for layer in guess]] * LAYERS) for loads, guess in trace(seed, 4)[0]]


def test_each_following_layer_is_told_of_nearest_first():
    steps = random_steps(3)
    engine, device, _ = run(steps, 12)
    told = iter(engine.policy.told)
    for _, guesses in steps:
        for layer, guess in enumerate(guesses):
            for later in range(layer + 1, min(layer + 4, LAYERS)):
                assert next(told) == (later, guess[later])
    assert next(told, None) is None
    assert device.queues
    for at, queue in device.queues:
        layers = [copy.layer for copy in queue]
        assert layers == sorted(layers) and at.layer < min(layers) and max(layers) <= at.layer + 3
        assert len({(copy.layer, copy.slot) for copy in queue}) == len({(copy.layer, copy.expert) for copy in queue}) == len(queue)


@pytest.mark.parametrize("rule", ["finish", "abort"])
def test_a_running_copy_for_a_later_layer_is_kept_from_half_on(rule):
    """By hand, in ms: attention 0.1, CPU 1, merge 0, copies 1.6 each. Routing events at 0.1, 1.2, 2.3 and 3.4; expert 9 of layer 2 is
    predicted in layer 0 and copied from 0.1 to 1.7: at 1.2 it is 1.1/1.6 = 69 % done. Nothing else is asked for.
    """
    machine = load("pinned-link")
    machine = replace(machine, cpu=replace(machine.cpu, c0=1.0, a=0.0, b=0.0), link=replace(machine.link, s_sp=0.6, t1=1.0),
                      layer=replace(machine.layer, o_att=0.1, o_post=0.0, kappa=1.0))
    steps = [([{5: 4}, {5: 4}, {9: 4}, {5: 4}], [[{}, {}, {9: 4}, {}]] * 4)]
    engine, _, rows = run(steps, 2, EngineSettings(in_flight=rule), machine)
    totals = engine.totals["decode"]
    copies = [row for row in rows if row["kind"] == "copy.spec"]
    assert {row["layer"] for row in copies} == {2} and {tuple(row["experts"]) for row in copies} == {(9,)}
    if rule == "finish":
        assert [(row["start_ns"], row["end_ns"]) for row in copies] == [(100_000, 1_700_000)]
        assert (totals.speculative, totals.used, totals.abandoned, totals.hits) == (1, 1, 0, 1)
        assert [row["experts"] for row in rows if row["kind"] == "gpu.resident"] == [[9]]
    else:  # begun again in layer 1, at 1.2, and 69 % done at 2.3: too late for layer 2
        assert [(row["start_ns"], row["end_ns"]) for row in copies] == [(100_000, 1_200_000), (1_200_000, 2_300_000)]
        assert (totals.speculative, totals.used, totals.abandoned, totals.hits) == (2, 0, 2, 0)


def test_a_later_queue_does_not_push_out_what_an_earlier_one_brought():
    """One slot a layer. Layer 0 predicts expert 7 for layer 2, layer 1 expert 8: 7 has landed and stays."""
    engine, _, _ = run([([{5: 4}] * 4, [[{}, {}, {7: 4}, {}], *[[{}, {}, {8: 4}, {}]] * 3])], 1, machine=load("pinned-link"))
    assert engine.slots[2].resident() == {7}


@pytest.mark.parametrize("rule", ["finish", "abort"])
def test_what_is_counted_is_what_the_rows_show(rule):
    for seed in range(6):
        engine, _, rows = run(random_steps(seed), 8, EngineSettings(in_flight=rule), load("pinned-link"))
        totals, copies = engine.totals["decode"], [row for row in rows if row["kind"] == "copy.spec"]
        assert totals.speculative == len(copies) and totals.abandoned == sum(row.get("abandoned", False) for row in copies)
        ran = {(row["step"], row["layer"], e) for row in rows if row["kind"] == "gpu.resident" for e in row["experts"]}
        came = [(row["step"], row["layer"], row["experts"][0]) for row in copies if not row.get("abandoned")]
        assert len(came) == len(set(came)), "none comes twice"
        assert totals.used == sum(one in ran for one in came) > 0
