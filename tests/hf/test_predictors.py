"""Predictors in a swapped model: the unpatched model's tokens, and the simulation of what was recorded is the run."""

import numpy as np
import pytest
import torch

import apexk
from apexk import hardware
from apexk.demo import model as demo
from apexk.policy.predictor import ARRAYS, DISTANCES, SCHEMA, Predictor, write
from apexk.sim import trace
from apexk.sim.demand import demand_of
from apexk.sim.record import Recorder
from apexk.sim.run import simulate

SPECS = {"linear": "mira(predictor={})", "recurrent": "replication(theta=1, predictor={})"}


def drawn(kind, path, layers=4, experts=32):
    """A predictor of random numbers: what it says must not change a token."""
    draw, sizes = np.random.default_rng(2), {"L": layers, "E": experts, "5": 5, "R": 8, "H": 4, "G": 12}
    arrays = {name: (0.5 * draw.standard_normal([sizes[axis] for axis in axes])).astype(np.float32) for name, axes in ARRAYS[kind].items()}
    arrays["at"][:, 0] -= 2
    return write(Predictor({"schema": SCHEMA, "kind": kind, "model": "drawn", "layers": layers, "experts": experts, "top_k": 4, "distance": DISTANCES[kind]}, arrays), path)


@pytest.mark.parametrize("kind", SPECS)
def test_tokens_and_replay(trained, tmp_path, kind):
    policy = SPECS[kind].format(drawn(kind, tmp_path / "p.npz"))
    model, tokenizer = trained()
    texts = demo.prompts(3, seed=21)
    wanted = demo.generate(model, tokenizer, texts, 5)
    for pool in (0, 1, 4, 16, 32):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)) as handle:
            handle.engine.recorder = recorder = Recorder(3, 32, "demo")
            assert torch.equal(demo.generate(model, tokenizer, texts, 5), wanted), pool
            ran = handle.engine.totals
        made = recorder.trace()
        again = simulate(demand_of(made), hardware.load("a6000-paper"), policy, pool, warmup=0).totals
        for phase in ("prefill", "decode"):
            for name in ("steps", "active", "hits", "exact", "speculative", "used", "cpu_pairs"):
                assert getattr(ran[phase], name) == getattr(again[phase], name), (pool, phase, name)
            assert ran[phase].step_ms == pytest.approx(again[phase].step_ms)
    assert pool == 32 and ran["decode"].steps == 4


def test_where_it_cannot_work(trained, tmp_path, monkeypatch):
    """A trace whose predictions do not reach two layers; a model whose routers cannot be asked early; a model of another shape."""
    path = drawn("linear", tmp_path / "p.npz")
    spec = f"mira(predictor={path})"
    short = trace.read("sample:demo")
    assert short.ahead_experts is None and short.layers == 4
    with pytest.raises(ValueError, match="asks its predictor 2 layers ahead, the predictions of .* reach 1"):
        simulate(demand_of(short), hardware.load("a6000-paper"), spec, 4, warmup=0)
    model, _ = trained()
    with pytest.raises(ValueError, match="4 layers of 16 experts"):
        apexk.swap(model, apexk.ApexConfig(policy=f"mira(predictor={drawn('linear', tmp_path / 'q.npz', experts=16)})"))
    from dataclasses import replace

    from apexk.hf import swap as swapping

    found = swapping.find_experts
    monkeypatch.setattr(swapping, "find_experts", lambda model: replace(e := found(model), family=replace(e.family, router=None)))
    with pytest.raises(ValueError, match="nothing can be predicted for qwen3_moe"):
        apexk.swap(model, apexk.ApexConfig(policy=spec))
    monkeypatch.undo()
    apexk.swap(model).restore()  # it was left as it was
