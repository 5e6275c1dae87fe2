"""Bad input is refused with what came and what was wanted, and the model stays as it was; what would be silently wrong
while a model is swapped is refused too."""

import dataclasses

import pytest
import torch
from hf_models import tiny
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import apexk
from apexk.hf.families import FAMILIES


def dense():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))


def switch():
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=2,
        num_sparse_decoder_layers=1, num_heads=2, num_experts=4, decoder_start_token_id=0))  # fmt: skip


def quantised():
    model = tiny()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def marked_quantised():
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def on_meta():
    return tiny().to("meta")


BAD_MODELS = [
    (dense, {}, "dense"),
    (switch, {}, "switch_transformers.*does not know.*not on the.*experts interface.*qwen3_moe"),
    (lambda: torch.nn.Linear(2, 2), {}, "no Hugging Face model"),
    (lambda: tiny(mlp_only_layers=[0, 1]), {}, "every layer"),
    (lambda: tiny(hidden_act="relu"), {}, "experts apply"),
    (lambda: tiny(num_experts_per_tok=0), {}, "0 of 4 experts; wanted 1..4"),
    (lambda: tiny(num_experts_per_tok=-1), {}, "-1 of 4 experts"),
    (lambda: tiny(num_experts_per_tok=5), {}, "5 of 4 experts"),
    (quantised, {}, "quantised"),
    (marked_quantised, {}, "quantised"),
    (on_meta, {}, "meta"),
    (lambda: tiny().double(), {}, "float64"),
    (tiny, {"pool": 5}, "pool is 5.*4 experts"),
    (tiny, {"hardware": "h900"}, "a6000-paper"),
    (tiny, {"popularity": [[1, 2, 3, 4]]}, "popularity"),
    (tiny, {"timeline": "/nonexistent/folder/t.jsonl"}, "nonexistent"),
]


@pytest.mark.parametrize(("make", "config", "said"), BAD_MODELS, ids=lambda v: getattr(v, "__name__", str(v))[:30])
def test_bad_input_is_refused_and_changes_nothing(make, config, said, native_threads):
    model = make()
    before, ended = list(vars(model)), native_threads()
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError, OSError), match=f"(?s){said}"):
        apexk.swap(model, apexk.ApexConfig(**config))
    assert list(vars(model)) == before and [p.data_ptr() for p in model.parameters()] == pointers
    assert ended()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": "best"}, "apex"),
        ({"pool": -1}, "pool"),
        ({"pool": 2.5}, "pool"),
        ({"pool": True}, "pool"),
        ({"threads": 0}, "threads"),
        ({"device": "tpu"}, "virtual"),
        ({"arithmetic": "exact"}, "arithmetic"),
        ({"dense": "mkl", "device": "cpu"}, "kernels, torch"),
        ({"dense": "torch"}, "device 'cpu'"),
        ({"in_flight": "wait"}, "in_flight"),
        ({"cost": "cubic"}, "cost"),
        ({"utility_decay": 1.5}, "utility_decay"),
        ({"rate_ema": "often"}, "rate_ema"),
        ({"resident_first": "no"}, "resident_first"),
        ({"policy": None}, "policy is None"),
        ({"policy": 5}, "policy is 5"),
        ({"hardware": None}, "hardware is None"),
        ({"timeline": 5}, "timeline is 5"),
        ({"part_tokens": None}, "part_tokens is None"),
        ({"seed": None}, "seed is None"),
        ({"popularity": [[float("nan")] * 8] * 4}, "popularity"),
        ({"popularity": [[-1.0] * 8] * 4}, "popularity"),
        ({"popularity": "x"}, "popularity"),
        ({"popularity": [1, 2]}, "popularity"),
    ],
    ids=str,
)
def test_bad_config(config, said):
    with pytest.raises((ValueError, TypeError), match=said):
        apexk.ApexConfig(**config)


def test_swapping_twice_is_refused():
    model = tiny()
    with apexk.swap(model, apexk.ApexConfig(pool=1)):
        with pytest.raises(RuntimeError, match="already"):
            apexk.swap(model)
    apexk.swap(model).restore()


def test_a_path_in_place_of_a_model():
    with pytest.raises(apexk.UnsupportedModel, match=r"apexk.load\('some/folder'\)"):
        apexk.swap("some/folder")


def test_popularity_of_a_family_without_a_router(monkeypatch):
    model = tiny()
    kind = model.config.model_type
    monkeypatch.setitem(FAMILIES, kind, dataclasses.replace(FAMILIES[kind], router=None, experts_only=True))
    with pytest.raises(apexk.UnsupportedModel, match="cannot be counted"):
        apexk.popularity(model, [{"input_ids": torch.arange(3)[None]}])


def test_a_policy_with_slots_of_its_own_on_a_cpu():
    with pytest.raises(ValueError, match="'llamacpp_static32' copies experts into 4 slots of its own, but device 'cpu' has no"):
        apexk.swap(tiny(), apexk.ApexConfig(policy="llamacpp_static32", device="cpu"))


def test_config_of_the_wrong_type():
    with pytest.raises(TypeError, match="ApexConfig"):
        apexk.swap(tiny(), {"pool": 2})


def test_shared_experts_are_refused():
    model = tiny()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj
    with pytest.raises(ValueError, match="share"):
        apexk.swap(model)


def test_a_used_handle_is_refused():
    handle = apexk.swap(tiny(), apexk.ApexConfig(pool=2))
    handle.restore()
    with pytest.raises(RuntimeError, match="restored"), handle:
        pass


def test_two_runs_into_one_timeline_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    model = tiny()
    with apexk.swap(tiny(), apexk.ApexConfig(pool=2, timeline=path)):
        with pytest.raises(OSError, match="another run"):
            apexk.swap(model, apexk.ApexConfig(pool=2, timeline=path))
        apexk.swap(model, apexk.ApexConfig(pool=2)).restore()
    assert path.exists()


def test_training_is_refused_and_a_bare_forward_works():
    model, ids = tiny(), torch.arange(6)[None]
    with apexk.swap(model, apexk.ApexConfig(pool=2)):
        assert model(ids).logits.shape == (1, 6, 64), "eval mode outside no_grad"
        model.train()
        with pytest.raises(RuntimeError, match="eval"):
            model(ids)
        model.eval()


def test_a_backward_pass_is_refused():
    """A gradient through detached experts would be silently wrong."""
    model, ids = tiny(), torch.arange(6)[None]
    with apexk.swap(model, apexk.ApexConfig(pool=2)):
        loss = model(ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="inference"):
            loss.backward()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None


def test_weights_replaced_while_swapped_are_noticed():
    model, ids = tiny(), torch.arange(6)[None]
    handle = apexk.swap(model, apexk.ApexConfig(pool=2))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="restore first"), torch.no_grad():
        model(ids)
    handle.restore()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "the user's change stays"
    with torch.no_grad():
        model(ids)
