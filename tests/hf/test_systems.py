"""The other systems' policies with the settings that make them move: the unpatched model's FP32 tokens at pools 0, 1, topk, E/2, E."""

import pytest
import torch

import apexk
from apexk.demo import model as demo

SPECS = ["kt_static(placement=random, stream_tokens=8)", "kt_dynamic(stream_tokens=8)", "replication(theta=1)", "flexgen"]


@pytest.fixture(scope="module")
def plain(trained):
    model, tokenizer = trained()
    texts = demo.prompts(3, seed=22)
    return texts, demo.generate(model, tokenizer, texts, 4)


@pytest.mark.parametrize("policy", SPECS)
def test_tokens_are_the_unpatched_models(trained, plain, policy):
    model, tokenizer = trained()
    texts, wanted = plain
    for pool in (0, 1, 4, 16, 32):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)) as handle:
            assert torch.equal(demo.generate(model, tokenizer, texts, 4), wanted), pool
            assert all(phase.steps for phase in handle.engine.totals.values())
