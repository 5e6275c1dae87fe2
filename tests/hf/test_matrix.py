"""Every family x policy x pool against the unpatched model in float32. A seeded sample runs always, with each family, policy and
pool in it and each family with two pools; the whole product is nightly."""

import random

import pytest
import torch

import apexk
from apexk.hf.families import FAMILIES
from apexk.testing.tiny import CONFIGS, tiny

POLICIES = ("apex", "no_assign", "mixtral_offloading")
TYPES = sorted(set(CONFIGS) & set(FAMILIES))
EXPERTS, TOPK = 8, 2
POOLS = (0, TOPK, EXPERTS // 2, EXPERTS)
ALL = [(t, policy, pool) for t in TYPES for policy in POLICIES for pool in POOLS]


def sample():
    """Two of the twelve cells of each family, in a Latin turn, so that every pair of policy and pool comes up."""
    cells = [(policy, pool) for policy in POLICIES for pool in POOLS]
    random.Random(6).shuffle(cells)
    return [(t, *cells[(2 * i + k) % len(cells)]) for i, t in enumerate(TYPES) for k in range(2)]


SAMPLE = sample()


def test_the_sample_covers():
    assert {t for t, _, _ in SAMPLE} == set(TYPES) and len(TYPES) == 21
    assert {(policy, pool) for _, policy, pool in SAMPLE} == {(policy, pool) for policy in POLICIES for pool in POOLS}


def generated(model):
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


def check(model_type, policy, pool):
    model = tiny(model_type, seed=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = generated(model)
    # with eight experts and all tokens on the GPU a pool of 0 has nowhere to run them: the policy then takes a scratch slot
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)) as handle:
        assert torch.equal(generated(model), wanted)
        state = model.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
        assert sum(phase["layers"] for phase in handle.summary().values()) == 4 * len(handle._experts.blocks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("model_type", "policy", "pool"), SAMPLE)
def test_float32_tokens(model_type, policy, pool):
    check(model_type, policy, pool)


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "policy", "pool"), sorted(set(ALL) - set(SAMPLE)))
def test_float32_tokens_of_the_rest(model_type, policy, pool):
    check(model_type, policy, pool)
