"""Deferred experts in the engine: which they are, when they run, and that the next layer's merge waits for them."""

import importlib
import random

import pytest
import torch
from test_against_oracle import EXPERTS, LAYERS, TOPK

from apexk.device.base import Rows
from apexk.device.checked import CheckedDevice
from apexk.device.virtual import VirtualDevice
from apexk.hardware import load
from apexk.policy import registry
from apexk.policy.types import CostPrior, ModelShape
from apexk.timeline.writer import Timeline


def choices(draw, tokens, capacity):
    """Each token's experts, heaviest first; now and then all are resident, so that the CPU has nothing to do but what is late."""
    return [draw.sample(range(capacity if draw.random() < 0.3 else EXPERTS), TOPK) for _ in range(tokens)]


def run_deferred(rules=None, defer=2, capacity=6, tokens=2, steps=5, seed=0, timeline=None):
    """Decode steps under the ordering check, on a machine that runs no empty CPU path; returns the engine and what each (step, layer) routed."""
    runtime, engine_layer = (importlib.import_module(f"apexk.engine.{name}") for name in ("runtime", "layer"))
    policy, shape, draw = registry.get(f"kt_static(defer={defer})"), ModelShape(LAYERS, EXPERTS, TOPK), random.Random(seed)
    policy.start(shape, capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0))
    timeline = timeline or Timeline(None)
    engine = runtime.Engine(shape, capacity, CheckedDevice(VirtualDevice(load("pinned-link"), timeline, 1000)), policy, rules or runtime.EngineSettings(), timeline, 1000)
    routed = {}
    for step in range(steps):
        for layer in range(LAYERS):
            routed[step, layer] = chosen = choices(draw, tokens, capacity)
            every = [e for row in chosen for e in row]
            rows = Rows(tokens=tokens, topk=TOPK, loads={e: every.count(e) for e in sorted(set(every))}, places={e: min(row.index(e) for row in chosen if e in row) for e in set(every)})
            engine_layer.join(engine, engine_layer.submit(engine, layer, rows, "decode"))
    return engine, routed


@pytest.mark.parametrize("defer", [1, 2, TOPK])
def test_who_is_deferred_and_when(defer):
    """By the rule, token by token: on the CPU (not resident) and among the `defer` lightest of every token that chose it; none in the last layer."""
    timeline, capacity = Timeline(None, keep=True), 6
    engine, routed = run_deferred(defer=defer, timeline=timeline, capacity=capacity)
    deferred = 0
    for (step, layer), chosen in routed.items():
        on_cpu = {e for row in chosen for e in row if e >= capacity}
        wanted = {e for e in on_cpu if all(e in row[TOPK - defer :] for row in chosen if e in row)} if layer + 1 < LAYERS else set()
        rows = [row for row in timeline.rows if (row["step"], row["layer"], row["kind"]) == (step, layer, "host.ffn")]
        late = [row for row in rows if row["reads"][0].startswith("rows")]
        assert {e for row in late for e in row["experts"]} == wanted
        assert {e for row in rows if row not in late for e in row["experts"]} == on_cpu - wanted
        deferred += len(wanted)
        (merged,) = (row for row in timeline.rows if (row["step"], row["layer"], row["kind"]) == (step, layer, "combine"))
        own = {name.split(".e")[1] for name in merged["reads"] if name.startswith("rows.")}
        assert own == {str(e) for row in chosen for e in row if e not in wanted}
        if late and layer + 1 < LAYERS:
            (after,) = (row for row in timeline.rows if (row["step"], row["layer"], row["kind"]) == (step, layer + 1, "combine"))
            assert set(late[0]["writes"]) <= set(after["reads"]) and late[0]["end_ns"] <= after["start_ns"]
    assert deferred > 0
    pairs = sum(1 for (_, _), chosen in routed.items() for row in chosen for e in row if e >= capacity)
    assert engine.totals["decode"].cpu_pairs == pairs, "late pairs count too"


def test_nothing_is_deferred_into_another_pass():
    """A pass that breaks off after the first layer leaves nothing to the next one's first layer."""
    engine, _ = run_deferred(steps=1)
    engine_layer = importlib.import_module("apexk.engine.layer")
    for _ in range(2):
        rows = Rows(tokens=1, topk=TOPK, loads={20: 1, 21: 1, 22: 1, 23: 1}, places={20: 0, 21: 1, 22: 2, 23: 3})
        task = engine_layer.submit(engine, 0, rows, "decode")
        assert task.before is None and engine.late.experts == (22, 23)
        engine_layer.join(engine, task)


def test_the_best_place_of_each_expert():
    """Of equal weights the first is the heavier."""
    rows = Rows(3, 3, x=torch.zeros(3, 1), topk_ids=torch.tensor([[4, 1, 7], [1, 9, 4], [5, 4, 9]]), topk_weights=torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.1, 0.3, 0.6]]))
    assert rows.best_places() == {1: 0, 7: 1, 4: 1, 9: 0, 5: 2}
    with pytest.raises(ValueError, match="nothing tells the experts' weights"):
        Rows(1, 3, loads={1: 1}).best_places()


def test_refusals():
    from apexk.config import ApexConfig

    for spec in ("kt_static(defer=-1)", "kt_dynamic(defer=x)", "kt_static(defer=true)"):
        with pytest.raises(ValueError, match="defer is"):
            registry.get(spec)
    with pytest.raises(ValueError, match="a token has 4 experts"):
        run_deferred(defer=5)
    with pytest.raises(ValueError, match="device 'cuda' cannot"):
        ApexConfig(policy="kt_static(defer=1)", device="cuda")
    assert registry.get("kt_static").lossless and not registry.get("kt_dynamic(defer=1)").lossless
