"""Coalescing changes no token: attention by micro-batch or on the CPU, experts on the whole batch, plain and swapped."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import sdpa_attention

import apexk
from apexk.demo import model as demo
from apexk.hf import coalesce
from apexk.hf.coalesce import coalesced
from apexk.hf.split_cache import SplitCache


@pytest.fixture(scope="module")
def plain(trained):
    model, tokenizer = trained()
    texts = demo.prompts(5, seed=31)
    return texts, demo.generate(model, tokenizer, texts, 6)


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 8])
def test_tokens_are_the_ordinary_batchs(trained, plain, micro_batch):
    model, tokenizer = trained()
    texts, wanted = plain
    with coalesced(model, micro_batch):
        assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted)


def test_attention_runs_by_micro_batch_and_experts_once(trained, plain, monkeypatch):
    model, tokenizer = trained()
    texts, wanted = plain
    sizes = []

    def counted(module, query, *rest, **more):
        sizes.append(query.shape[0])
        return sdpa_attention.sdpa_attention_forward(module, query, *rest, **more)

    monkeypatch.setattr(coalesce, "sdpa_attention_forward", counted)
    with apexk.swap(model, apexk.ApexConfig(policy="cox_moe", pool=8)) as handle, coalesced(model, 2):
        assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted)
        steps = sum(t.steps for t in handle.engine.totals.values())
        assert sum(t.layers for t in handle.engine.totals.values()) == steps * 4, "the engine ran each layer once a step"
    assert sizes[:3] == [2, 2, 1] and set(sizes) == {1, 2} and len(sizes) == 3 * 4 * steps


def test_the_attention_is_as_before_afterwards(trained):
    model, _ = trained()
    before = model.config._attn_implementation
    with pytest.raises(KeyError), coalesced(model, 2):
        raise KeyError
    assert model.config._attn_implementation == before
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="whole number of requests"), coalesced(model, bad):
            pass


@pytest.mark.parametrize(("on_host", "requests"), [(0, 0), (0.4, 2), (1, 5)])
def test_attention_of_some_requests_on_the_cpu_over_their_own_cache(trained, plain, monkeypatch, on_host, requests):
    """Tokens as ever; the cache holds 2 x 4 layers x 2 heads x 32 values x 4 bytes a token and request, each in its place."""
    model, tokenizer = trained()
    texts, wanted = plain
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    cache = SplitCache(model, on_host)
    with apexk.swap(model, apexk.ApexConfig(policy="cox_moe", pool=8)), coalesced(model, 2), torch.no_grad():
        out = model.generate(**batch, max_new_tokens=6, do_sample=False, past_key_values=cache)
    length = batch["input_ids"].shape[1]
    assert torch.equal(out[:, length:], wanted)
    one = 2 * 4 * 2 * 32 * 4 * (length + 5)
    assert cache.get_seq_length() == length + 5 and cache.nbytes() == {"device": (5 - requests) * one, "host": requests * one}


def test_what_a_split_cache_refuses(trained):
    model, _ = trained()
    for bad in (-0.1, 1.1, True, "half"):
        with pytest.raises(ValueError, match="share of the requests"):
            SplitCache(model, bad)
    sliding = copy.deepcopy(model.config)
    sliding.layer_types = ["full_attention", "sliding_attention"] * 2
    sliding.sliding_window = 8
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer; only full attention"):
        SplitCache(SimpleNamespace(config=sliding), 0.5)
    cache, states = SplitCache(model, 0.5), torch.zeros(4, 2, 3, 32)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match=r"2 \+ 2 requests got 3"):
        cache.update(states[:3], states[:3], 0)
    with pytest.raises(ValueError, match="no beam search"):
        cache.reorder_cache(torch.arange(4))
