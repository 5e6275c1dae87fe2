"""Every family of the table against its unpatched model, and the ones that are refused."""

import pytest
import torch

import apexk
from apexk.hf.families import FAMILIES, Family
from apexk.hf.inspect import UnsupportedModel, find_experts
from apexk.testing.tiny import CONFIGS, tiny

TOKENS = 6


def prompts():
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4], ids[1, :4] = 0, 0  # left padding
    return {"input_ids": ids, "attention_mask": mask}


def generate(model):
    with torch.no_grad():
        return model.generate(**prompts(), max_new_tokens=TOKENS, do_sample=False)


#: the design's types; every other class of the library is held to its line of the generated table (`test_sweep.py`)
TYPES = sorted(set(FAMILIES) & set(CONFIGS))


@pytest.mark.parametrize("model_type", TYPES)
def test_float32_tokens_and_a_clean_restore(model_type):
    model = tiny(model_type)
    keys = list(model.state_dict())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wanted = generate(model)
    for policy, pool in (("apex", 0), ("apex", 2), ("apex", 8), ("no_assign", 4), ("sa_only", 2), ("ea_only", 4)):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)):
            assert torch.equal(generate(model), wanted), (policy, pool)
            assert list(model.state_dict()) == keys
    with apexk.swap(model, apexk.ApexConfig(device="cpu")):
        assert torch.equal(generate(model), wanted), "cpu"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.is_contiguous(), name
    assert torch.equal(generate(model), wanted)


@pytest.mark.parametrize("model_type", TYPES)
def test_bfloat16_is_no_farther_from_float32_than_the_unpatched_model(model_type):
    """Error of the logits against the float32 model, at most 1.1 x the plain bfloat16 model's own: the median over 512
    tokens of each token's root mean square. (The median, since in random models rounding often flips a choice of experts,
    in the plain run as much as in ours, and the few tokens that it hits would decide a mean.)"""
    model = tiny(model_type, dtype=torch.bfloat16)
    exact = tiny(model_type)
    exact.load_state_dict({name: value.to(exact.state_dict()[name].dtype) for name, value in model.state_dict().items()})
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    ids = torch.randint(3, 128, (16, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        truth = exact(ids).logits
        plain = model(ids).logits.float()
        with apexk.swap(model, apexk.ApexConfig(pool=4)):
            swapped = model(ids).logits.float()
            assert {name: p.dtype for name, p in model.named_parameters()} == dtypes, "a float32 router stays float32"
    error, own = ((out - truth).pow(2).mean(-1).sqrt().median() for out in (swapped, plain))
    assert error <= 1.1 * own


@pytest.mark.parametrize("model_type", TYPES)
def test_same_arithmetic_is_bitwise_equal(model_type):
    model = tiny(model_type, dtype=torch.bfloat16)
    found = []
    for policy, pool in (("apex", 0), ("apex", 2), ("apex", 8), ("sa_only", 4)):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool, arithmetic="same")), torch.no_grad():
            found.append(model(**prompts()).logits)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("model_type", TYPES)
def test_router_logits_are_recorded_once(model_type):
    """The next layer's router is also run to predict; the library's recording must not see that."""
    model = tiny(model_type)
    with torch.no_grad():
        plain = model(**prompts(), output_router_logits=True).router_logits
        with apexk.swap(model, apexk.ApexConfig(pool=4)):
            swapped = model(**prompts(), output_router_logits=True).router_logits
    assert len(swapped) == len(plain)
    real = prompts()["attention_mask"].bool()
    for a, b in zip(plain, swapped, strict=True):
        a, b = (t.reshape(*real.shape, -1)[real] for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_user_can_add_a_family(monkeypatch):
    model = tiny("mixtral")
    model.config.model_type = "mine"
    assert find_experts(model).family.experts_only, "without a row only the experts are replaced"
    monkeypatch.setitem(FAMILIES, "mine", Family("MixtralSparseMoeBlock"))
    wanted = generate(model)
    with apexk.swap(model, apexk.ApexConfig(pool=3)):
        assert torch.equal(generate(model), wanted)


@pytest.mark.parametrize(("hidden_act", "supported"), [("gelu", True), ("gelu_pytorch_tanh", True), ("relu", False), ("tanh", False)])
def test_activations(hidden_act, supported):
    model = tiny("qwen3_moe", hidden_act=hidden_act)
    if not supported:
        with pytest.raises(UnsupportedModel, match="experts apply"):
            apexk.swap(model)
        return
    wanted = generate(model)
    with apexk.swap(model, apexk.ApexConfig(pool=3)):
        assert torch.equal(generate(model), wanted)
