"""Every policy gives the unpatched model's FP32 tokens, whatever the pool; waves, scratch slots and posted copies included."""

import pytest
import torch

import apexk
from apexk.demo import model as demo
from apexk.policy import names

#: the others are in test_equality.py
MORE = [n for n in names() if n not in ("no_assign", "sa_only", "ea_only", "apex")]
SPECS = [*MORE, "apex(cost=rates)", "apex(evict=lru)", "fiddler_original(threshold=1)", "fixed_p(p=3, keep=false)", "post_fetch(sets=2)", "mira(miss=cpu)", "mira(every=2)",
         "kt_static(placement=front)", "freetoken_q(evict=utility)"]


@pytest.fixture(scope="module")
def plain(trained):
    model, tokenizer = trained()
    texts = demo.prompts(3, seed=21)
    return texts, demo.generate(model, tokenizer, texts, 5)


def same(trained, plain, policy, pool, **more):
    model, tokenizer = trained()
    texts, wanted = plain
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool, **more)) as handle:
        assert torch.equal(demo.generate(model, tokenizer, texts, 5), wanted)
        return handle.engine.totals


@pytest.mark.parametrize("policy", SPECS)
def test_tokens_are_the_unpatched_models(trained, plain, policy):
    for pool in (0, 4):
        totals = same(trained, plain, policy, pool)
        for phase in totals.values():
            assert phase.steps > 0


@pytest.mark.parametrize("policy", ("apex", "sa_only", "mixtral_offloading", "llamacpp_static32", "kt_dynamic(stream_tokens=8)"))
def test_tokens_from_slots_that_layers_share(trained, plain, policy):
    for pool in (0, 1, 4, 16, 32):
        same(trained, plain, policy, pool, pool_scope="global")


@pytest.mark.nightly
@pytest.mark.parametrize("pool", (2, 16, 32))
@pytest.mark.parametrize("policy", SPECS)
def test_tokens_at_every_pool(trained, plain, policy, pool):
    same(trained, plain, policy, pool)


def test_what_is_promised_is_moved(trained, plain):
    """GPU-only runs no pair on the CPU; policies that never fetch move no exact copy; Post-Fetch copies between steps."""
    assert same(trained, plain, "mixtral_offloading", 4)["decode"].cpu_pairs == 0
    assert same(trained, plain, "fiddler_static", 4)["decode"].bytes == 0
    posted = same(trained, plain, "post_fetch", 8)["decode"]
    assert posted.exact == 0 and posted.speculative > 0 and posted.used > 0
