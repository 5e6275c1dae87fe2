"""Coalescing changes no token: attention by micro-batch, experts on the whole batch, plain and swapped."""

import pytest
import torch
from transformers.integrations import sdpa_attention

import apexk
from apexk.demo import model as demo
from apexk.hf import coalesce
from apexk.hf.coalesce import coalesced


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
