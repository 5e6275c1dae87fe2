"""MoE-Lightning's pages: the unpatched model's FP32 tokens at pools 0, 1, topk, E/2, E, and a run that its recording repeats."""

import pytest
import torch

import apexk
from apexk import hardware
from apexk.demo import model as demo
from apexk.sim.demand import demand_of
from apexk.sim.record import Recorder
from apexk.sim.run import simulate


@pytest.mark.parametrize("policy", ["moe_lightning", "moe_lightning(weights=0)"])
def test_tokens_and_replay(trained, policy):
    model, tokenizer = trained()
    texts = demo.prompts(3, seed=22)
    wanted = demo.generate(model, tokenizer, texts, 4)
    for pool in (0, 1, 4, 16, 32):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)) as handle:
            handle.engine.recorder = recorder = Recorder(3, 32, "demo")
            assert torch.equal(demo.generate(model, tokenizer, texts, 4), wanted), pool
            ran = handle.engine.totals
        again = simulate(demand_of(recorder.trace()), hardware.load("a6000-paper"), policy, pool, warmup=0).totals
        for phase in ("prefill", "decode"):
            assert ran[phase].cpu_pairs == 0 and ran[phase].steps > 0
            for name in ("steps", "active", "hits", "exact", "speculative", "used", "abandoned"):
                assert getattr(ran[phase], name) == getattr(again[phase], name), (pool, phase, name)
            assert ran[phase].step_ms == pytest.approx(again[phase].step_ms)
