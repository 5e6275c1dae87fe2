"""Inputs that are run in parts: the same result as whole, whatever the policy, the pool and the size of a part."""

import itertools

import pytest
import torch
from hf_models import tiny

import apexk


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return tiny(num_experts=8, num_hidden_layers=3)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 64, (2, 45), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("policy", "device"), [*itertools.product(["apex", "ea_only", "no_assign", "mixtral_offloading"], ["virtual"]), ("apex", "cpu")])
def test_parts_change_no_bit(model, ids, policy, device):
    """90 tokens in parts of 1 to 89: 90 is one part and the value that the others must have."""
    for pool in (0, 2, 8) if device == "virtual" else (0,):
        found = []
        for part_tokens in (90, 89, 31, 7, 1):
            config = apexk.ApexConfig(policy=policy, pool=pool, device=device, arithmetic="same", part_tokens=part_tokens)
            with apexk.swap(model, config), torch.no_grad():
                found.append(model(input_ids=ids).logits)
        assert all(torch.equal(logits, found[0]) for logits in found)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    assert torch.allclose(found[0], plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixtral_offloading", "llamacpp_static32", "freetoken_q", "flexgen"])
def test_waves_run_all_parts_and_copy_for_once(model, ids, policy):
    """Where the slots do not hold what is missed: one set of copies whatever the size of a part, in bounded rows."""
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    for pool in (1, 2):
        copies = set()
        for part_tokens in (90, 31, 7, 1):
            with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool, part_tokens=part_tokens)) as handle, torch.no_grad():
                for _ in range(2):  # the second pass finds the buffers of the first
                    assert torch.allclose(model(input_ids=ids).logits, plain, rtol=0, atol=2e-6)
                rows = {number: buffer.shape[0] for number, buffer in handle._device.halves._part_pairs.items()}
                assert part_tokens == 90 or (2 in rows and set(rows.values()) == {part_tokens * 2}), rows
                copies.add(handle.summary()["prefill"]["exact"])
        assert len(copies) == 1 or handle.engine.policy.speculates and max(copies) <= 2 * 3 * 8


def test_a_parts_rows_are_bounded_and_used_again(model, ids):
    with apexk.swap(model, apexk.ApexConfig(policy="apex(waves=false)", pool=4, part_tokens=8)) as handle, torch.no_grad():
        model(input_ids=ids)
        buffers = dict(handle._device.halves._part_pairs)
        model(input_ids=ids)
        assert handle._device.halves._part_pairs == buffers  # the same tensors
        assert sorted(buffers) == [0, 1] and all(buffer.shape[0] == 8 * 2 for buffer in buffers.values())
        exact = handle.summary()["prefill"]["exact"]
    assert exact <= 2 * 3 * 8, "an expert is copied at most once a layer and step, not once a part"


@pytest.mark.parametrize("policy", ["apex(waves=false)", "freetoken_q"])
def test_buffers_of_one_pass_serve_the_next_in_any_mode(model, ids, policy):
    """A pass in inference mode makes the buffers of parts and waves, passes outside of it write to them."""
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=2, part_tokens=7)):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(model(input_ids=ids).logits, plain, rtol=0, atol=2e-6)
