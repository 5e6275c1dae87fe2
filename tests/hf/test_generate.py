"""What people do with `generate` while a model is swapped: beams, sampling, assisted decoding, static caches, paddings, long answers."""

import pytest
import torch
from hf_models import assert_as_before, snapshot, tiny

import apexk
from apexk.demo import model as demo
from apexk.testing.tiny import tiny as family

CONFIG = apexk.ApexConfig(policy="apex", pool=3)


def both(model, call):
    """(unpatched, swapped)"""
    with torch.no_grad():
        plain = call(model)
        with apexk.swap(model, CONFIG):
            return plain, call(model)


@pytest.mark.parametrize("how", [
    {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "top_k": 8}, {"cache_implementation": "static"},
    {"use_cache": False}, {"prompt_lookup_num_tokens": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_ways_to_generate(model_type, how):
    if model_type == "gpt_oss" and "prompt_lookup_num_tokens" in how:
        pytest.skip("its sliding windows cannot be cropped, as assisted decoding wants")
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1))

    def call(model):
        torch.manual_seed(4)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, **({"do_sample": False} | how))

    plain, swapped = both(family(model_type), call)
    assert torch.equal(plain, swapped)


def test_assisted_by_another_model():
    helper, ids = family("qwen3_moe", seed=5), torch.arange(3, 12)[None]
    plain, swapped = both(family("qwen3_moe"), lambda m: m.generate(ids, assistant_model=helper, max_new_tokens=8, do_sample=False))
    assert torch.equal(plain, swapped)


def test_the_helper_may_be_swapped_too():
    model, helper, ids = family("qwen3_moe"), family("mixtral", seed=5), torch.arange(3, 12)[None]
    with torch.no_grad():
        wanted = model.generate(ids, assistant_model=helper, max_new_tokens=8, do_sample=False)
        with apexk.swap(model, CONFIG), apexk.swap(helper, CONFIG):
            assert torch.equal(model.generate(ids, assistant_model=helper, max_new_tokens=8, do_sample=False), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
def test_paddings(side):
    ids = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, slice(None, 5) if side == "left" else slice(3, None)] = 0
    plain, swapped = both(tiny(), lambda m: m(ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(plain, swapped, rtol=1e-4, atol=1e-5)


def test_gpt_oss_and_dbrx_are_saved_loaded_copied_and_written_to_while_swapped(tmp_path):
    """Their parameters cannot all be views of the store."""
    import copy
    import pickle

    for model_type in ("gpt_oss", "dbrx"):
        model, ids = family(model_type), torch.arange(3, 15)[None]
        before, keys = snapshot(model), list(model.state_dict())
        other = {name: value + 0.01 for name, value in model.state_dict().items()}
        with torch.no_grad():
            wanted = model(ids).logits
            with apexk.swap(model, apexk.ApexConfig(pool=2)):
                model.save_pretrained(tmp_path / model_type)
                for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                    torch.testing.assert_close(twin(ids).logits, wanted, rtol=1e-4, atol=1e-4)
                    assert all(torch.equal(value, before[name][0]) for name, value in twin.named_parameters())
                model.load_state_dict(other)
                changed = model(ids).logits
                model.load_state_dict({name: before[name][0] if name in before else value for name, value in other.items()} | {
                    name: value - 0.01 for name, value in other.items() if name not in before})
                with pytest.raises(RuntimeError):
                    next(p for p in model.parameters() if type(p).__name__ == "StoredParameter").mul_(2)
            assert_as_before(model, before, keys)
            again = type(model).from_pretrained(tmp_path / model_type, dtype=torch.float32)
            assert all(torch.equal(value, before[name][0]) for name, value in again.named_parameters())
            model.load_state_dict(other)
            torch.testing.assert_close(changed, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt_oss", "dbrx"])
def test_a_conversion_while_swapped_is_kept(model_type):
    model, twin = family(model_type), family(model_type)
    handle = apexk.swap(model, apexk.ApexConfig(pool=2))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="restore first"), torch.no_grad():
        model(torch.arange(4)[None])
    handle.restore()
    for (name, value), wanted in zip(model.named_parameters(), twin.to(torch.bfloat16).parameters(), strict=True):
        assert type(value) is torch.nn.Parameter and torch.equal(value, wanted), name


def test_swap_restore_and_swap_with_another_pool():
    for model_type in ("gpt_oss", "dbrx", "llama4_text", "gemma4_like"):
        if model_type == "gemma4_like":  # a family without a row
            model = family("mixtral")
            model.config.model_type = "unknown"
        else:
            model = family(model_type)
        ids = torch.arange(3, 12)[None]
        with torch.no_grad():
            wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
            for pool in (1, 8, 0, 5):
                with apexk.swap(model, apexk.ApexConfig(pool=pool)):
                    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["apex", "mixtral_offloading"])
def test_two_thousand_tokens_with_churn(trained, policy):
    """A pool of three of 32 experts: nearly every step evicts in every layer."""
    model, tokenizer = trained()
    texts = demo.prompts(2, seed=9)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    how = {"max_new_tokens": 2000, "min_new_tokens": 2000, "do_sample": False}
    with torch.no_grad():
        wanted = model.generate(**batch, **how)
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=3)) as handle:
            assert torch.equal(model.generate(**batch, **how), wanted)
            decode = handle.summary()["decode"]
    assert decode["steps"] == 1999 and decode["exact"] > 2000
