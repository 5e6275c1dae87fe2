"""The engine on a virtual device without tensors, against a model of the run written from the design's description."""

import importlib
import random
from dataclasses import replace

import pytest
from oracle import Oracle

from apexk import hardware
from apexk.device.base import Rows
from apexk.device.virtual import VirtualDevice
from apexk.engine.runtime import EngineSettings
from apexk.policy import registry
from apexk.policy.types import CostPrior, ModelShape, PolicyOptions
from apexk.timeline.writer import Timeline

LAYERS, EXPERTS, TOPK, STEPS = 5, 24, 4, 14
PAPER = hardware.load("a6000-paper")


def trace(seed: int, tokens: int):
    """Loads and a noisy prediction for every step and layer, skewed so that experts come back."""
    draw = random.Random(seed)
    weights = [[draw.random() ** 4 + 0.01 for _ in range(EXPERTS)] for _ in range(LAYERS)]

    def routed(layer):
        loads = {}
        for _ in range(tokens):
            for e in draw.sample(range(EXPERTS), TOPK) if draw.random() < 0.3 else draw.choices(range(EXPERTS), weights[layer], k=TOPK):
                loads[e] = loads.get(e, 0) + 1
        return loads

    steps = []
    for _ in range(STEPS):
        loads = [routed(layer) for layer in range(LAYERS)]
        guess = []
        for layer in range(LAYERS):
            kept = {e: (n, round(draw.random(), 3)) for e, n in loads[layer].items() if draw.random() < 0.7}
            for e in draw.sample(range(EXPERTS), 3):
                kept.setdefault(e, (1, round(draw.random(), 3)))
            guess.append(kept)
        steps.append((loads, guess))
    popularity = [[int(1000 * w) + 1 for w in row] for row in weights]
    return steps, popularity


def run_engine(policy_name, capacity, steps, popularity, tokens, timeline=None, machine=PAPER, settings=None, wrap=lambda device: device, evict=None,
               order=None):
    """`order`: layers, as passes that end early or take turns come to them; without it, each step's in turn."""
    # by name at each call: the ordering tests put changed copies of these modules in their place
    Engine = importlib.import_module("apexk.engine.runtime").Engine
    engine_layer = importlib.import_module("apexk.engine.layer")
    policy = registry.get(policy_name, PolicyOptions(utility_decay=0.5, evict=evict))
    shape = ModelShape(LAYERS, EXPERTS, TOPK)
    prior = CostPrior(machine.cpu.c0, machine.cpu.a, machine.cpu.b, machine.link.s0, machine.link.t1, machine.gpu.g0, machine.gpu.g1,
                      machine.gpu.g2, machine.cpu.fixed_when_empty)
    policy.start(shape, capacity, prior, popularity)
    timeline = timeline or Timeline(None)
    device = wrap(VirtualDevice(machine, timeline, bytes_per_expert=6291456))
    settings = settings or EngineSettings(resident_first=False, in_flight="abort", prefetch_protects="in_use")
    if settings.pool_scope not in policy.pool_scopes:
        settings = replace(settings, pool_scope=None)
    engine = Engine(shape, capacity, device, policy, settings, timeline, 6291456)
    for number, layer in enumerate(order or list(range(LAYERS)) * len(steps)):
        loads, guess = steps[number // LAYERS]
        predicted = [({e: n for e, (n, _) in later.items()}, {e: s for e, (_, s) in later.items()}) for later in guess[layer + 1 :]]
        rows = Rows(tokens=tokens, topk=TOPK, loads=loads[layer], predicted=predicted)
        engine_layer.join(engine, engine_layer.submit(engine, layer, rows, "decode"))
    return engine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [0, 1, 6, 12, 24])
@pytest.mark.parametrize("name", ["no_assign", "sa_only", "ea_only", "apex"])
def test_times_and_transfers(name, capacity, seed):
    tokens = (1, 3, 8, 33)[seed]
    steps, popularity = trace(seed, tokens)
    spec = "apex(waves=false)" if name == "apex" else name  # the oracle has none
    engine = run_engine(spec, capacity, steps, popularity, tokens, evict="utility")
    oracle = Oracle(PAPER, LAYERS, capacity, exact=name in ("ea_only", "apex"), speculative=name in ("sa_only", "apex"), decay=0.5)
    oracle.start(engine.policy.initial, popularity, TOPK)
    total = sum(oracle.step(loads, guess) for loads, guess in steps)
    totals = engine.totals["decode"]
    assert {key: getattr(totals, key) for key in oracle.figures} == oracle.figures
    assert totals.step_ms == pytest.approx(total, rel=1e-6)
    assert totals.steps == STEPS and totals.layers == STEPS * LAYERS and totals.tokens == STEPS * tokens
