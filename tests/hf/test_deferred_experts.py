"""Expert deferral in a model, against the rule written out token by token in the library's own blocks."""

from dataclasses import replace

import pytest
import torch
from hf_models import tiny

import apexk
from apexk import hardware
from apexk.demo import model as demo
from apexk.sim.demand import demand_of
from apexk.sim.record import Recorder
from apexk.sim.run import simulate

PASSES = [torch.tensor([[3, 5], [7, 9]]), torch.tensor([[11], [2]]), torch.tensor([[4], [4]])]


def logits_of(model):
    with torch.no_grad():
        return [model(ids).logits for ids in PASSES]


def written_out(model, defer, resident):
    """Replaces each block's forward by the rule in plain loops, in float64: what is deferred by a block is added by the next."""
    left = {}

    def forward_of(layer, block, last):
        def forward(hidden_states):
            shape, x = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
            scores = torch.softmax((x.double() @ block.gate.weight.double().T), -1)
            weights, ids = scores.topk(block.gate.top_k, -1)
            if model.config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            kept = {e for row in ids.tolist() for e in row[: block.gate.top_k - defer]}  # topk gives them heaviest first
            out, later = left.pop(layer, torch.zeros(x.shape, dtype=torch.float64)).clone(), torch.zeros(x.shape, dtype=torch.float64)
            for t, row in enumerate(ids.tolist()):
                for k, e in enumerate(row):
                    gate, up = (block.experts.gate_up_proj[e].double() @ x[t].double()).chunk(2)
                    y = weights[t, k] * (block.experts.down_proj[e].double() @ (torch.nn.functional.silu(gate) * up))
                    (later if e >= resident and e not in kept and not last else out)[t] += y
            left[layer + 1] = later
            return out.to(x.dtype).reshape(shape)

        return forward

    blocks = [layer.mlp for layer in model.model.layers]
    for number, block in enumerate(blocks):
        block.forward = forward_of(number, block, number + 1 == len(blocks))
    return model


@pytest.mark.parametrize("device", ["virtual", "cpu"])
@pytest.mark.parametrize(("defer", "pool"), [(1, 0), (2, 0), (1, 3), (2, 8)])
def test_the_rule_token_by_token(defer, pool, device):
    if device == "cpu" and pool:
        return
    torch.manual_seed(1)
    settings = {"num_hidden_layers": 4, "num_experts": 8}
    model = tiny(**settings)
    plain = logits_of(model)
    with apexk.swap(model, apexk.ApexConfig(policy=f"kt_static(defer={defer})", pool=pool, device=device)) as handle:
        assert handle.info()["lossless"] is False
        got = logits_of(model)
    wanted = logits_of(written_out(model, defer, pool))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    differs = any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in zip(got, plain, strict=True))
    assert differs == (pool < 8), "the CPU has nothing to defer where every expert is resident"


def test_without_it_tokens_are_the_models_and_a_recording_replays(trained):
    model, tokenizer = trained()
    texts = demo.prompts(2, seed=5)
    wanted = demo.generate(model, tokenizer, texts, 6)
    with apexk.swap(model, apexk.ApexConfig(policy="kt_static(defer=0)", pool=8)) as handle:
        assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted) and handle.info()["lossless"]
    policy = "kt_static(defer=2)"
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=8)) as handle:
        handle.engine.recorder = recorder = Recorder(2, 32, "demo")
        demo.generate(model, tokenizer, texts, 6)
        ran = handle.engine.totals
    made = recorder.trace()
    again = simulate(demand_of(made), hardware.load("a6000-paper"), policy, 8, warmup=0).totals
    none = simulate(demand_of(made), hardware.load("a6000-paper"), "kt_static", 8, warmup=0).totals
    for phase in ("prefill", "decode"):
        assert ran[phase].cpu_pairs == again[phase].cpu_pairs == none[phase].cpu_pairs and ran[phase].step_ms == pytest.approx(again[phase].step_ms)
    # a second hand-over a layer: worth it where handing over costs little beside what is computed
    machine = hardware.load("pinned-link")
    machine = replace(machine, cpu=replace(machine.cpu, c0=0.0))
    with_it, without = (simulate(demand_of(made), machine, spec, 8, warmup=0).totals["decode"].step_ms for spec in (policy, "kt_static"))
    assert with_it < without
    bare = type(made)(**{**vars(made), "routed_weights": None})
    with pytest.raises(ValueError, match="holds no routed weights"):
        simulate(demand_of(bare), hardware.load("a6000-paper"), policy, 8, warmup=0)
