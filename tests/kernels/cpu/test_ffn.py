"""The grouped FFN against float64, for every instruction set that this machine runs."""

import pytest
import torch

from apexk.kernels.cpu.ffn import HostFFN

# 0 and 1 tokens; one below, at and above the groups of 6 and 12 tokens that kernels form; more than one group.
TOKENS = [0, 1, 2, 5, 6, 7, 13, 33]
# Below one vector; no multiple of any vector; just above a multiple of 256.
SIZES = [(8, 40), (40, 8), (100, 264), (264, 100), (256, 128)]


@pytest.mark.parametrize("hidden, intermediate", SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_values(case, ffn, tokens, hidden, intermediate):
    one = case(tokens, hidden, intermediate)
    one.check(one.run(ffn))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_other_dtypes(case, ffn, tokens, dtype):
    one = case(tokens, 100, 72, dtype=dtype)
    one.check(one.run(ffn))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_and_biases(case, ffn, activation, dtype):
    """Gates up to about 25, so that every tail and clamp is reached."""
    one = case(9, 72, 100, scale=8.0, biases=True, dtype=dtype)
    one.check(one.run(ffn, activation=activation), activation=activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_on_input(case, ffn, dtype):
    one = case(9, 72, 100, biases=True, dtype=dtype)
    one.check(one.run(ffn, weight_on_input=True), weight_on_input=True)


def test_more_tokens_than_one_unit(case, ffn):
    """Every token to one expert, more than a unit of work holds, beside experts without any."""
    one = case(230, 64, 96, experts=4, topk=1)
    one.ids.fill_(2)
    one.check(one.run(ffn))


@pytest.mark.parametrize("tokens", [47, 48, 49, 143, 144, 145, 300])
def test_many_tokens_of_one_expert(case, ffn, tokens):
    """Around what one unit of work holds and where products are formed in another way: right, and the same bits as alone."""
    one = case(tokens, 1064, 88, experts=1, topk=1)
    together = one.run(ffn)
    one.check(together)
    for token in (0, 5, tokens - 1):
        alone = case(tokens, 1064, 88, experts=1, topk=1)
        part = slice(token, token + 1)
        alone.x, alone.ids, alone.topk_weights = one.x[part], one.ids[part].contiguous(), one.topk_weights[part]
        alone.out = torch.full((1, 1064), torch.nan)
        assert torch.equal(alone.run(ffn)[0], together[token])


@pytest.mark.parametrize("tokens, hidden, intermediate, experts, topk", [
    pytest.param(5000, 8, 16, 4, 1, id="tokens beyond any preset"),
    pytest.param(3, 16, 8, 512, 8, id="many experts, few chosen"),
    pytest.param(5, 32, 32, 6, 6, id="every token to every expert"),
    pytest.param(7, 48, 32, 1, 1, id="one expert"),
    pytest.param(2, 1408, 264, 2, 1, id="a real width"),
])  # fmt: skip
def test_extents(case, ffn, tokens, hidden, intermediate, experts, topk):
    one = case(tokens, hidden, intermediate, experts=experts, topk=topk)
    one.check(one.run(ffn))


def test_more_units_than_the_ring(case, ffn):
    """Packed activations share a ring of buffers: units beyond it wait for the first ones to be read."""
    one = case(64, 32, 32, experts=60, topk=8)
    one.check(one.run(ffn))


def test_only_wanted_experts(case, ffn):
    one = case(9, 64, 32, wanted=[4, 1])
    got = one.run(ffn)
    asked = (one.ids == 1) | (one.ids == 4)
    assert torch.equal(~got.isnan().any(dim=1), asked.reshape(-1))
    one.check(got)


def test_no_wanted_expert(case, ffn):
    one = case(9, 64, 32)
    one.wanted.clear()
    assert one.run(ffn).isnan().all()


def test_absent_experts_need_no_block(case, ffn):
    one = case(9, 64, 32, wanted=[0, 2])
    one.blocks[1] = one.blocks[5] = 0
    one.check(one.run(ffn))


def test_duplicate_ids_are_two_pairs(case, ffn):
    one = case(3, 64, 32)
    one.ids[:] = torch.tensor([2, 2, 5])
    one.check(one.run(ffn))


def test_int32_ids_and_strided_rows(case, ffn):
    one = case(5, 64, 32, ids_dtype=torch.int32)
    wide = torch.full((5, 80), torch.nan, dtype=one.x.dtype)
    wide[:, :64] = one.x
    one.x = wide[:, :64]
    one.check(one.run(ffn))


def test_nan_and_infinity_stay_in_their_token(case, ffn):
    """Also at the end of a row: what lies beyond it must not be multiplied in."""
    one = case(7, 40, 40)
    clean = one.run(ffn)
    one.x[3, 39] = torch.nan
    one.x[5, 0] = torch.inf
    got = one.run(ffn).view(7, 3, 40)
    assert got[3].isnan().all() and not got[5].isfinite().any()
    others = [0, 1, 2, 4, 6]
    assert torch.equal(got[others], clean.view(7, 3, 40)[others])


def test_a_token_does_not_depend_on_its_neighbours(case, ffn):
    """33 tokens form groups of other sizes than one does, and sums over 1064 elements pause between blocks of k."""
    one = case(33, 1064, 100, experts=3)
    together = one.run(ffn).view(33, 3, 1064)
    for token in (0, 5, 6, 31, 32):
        alone = case(33, 1064, 100, experts=3)
        part = slice(token, token + 1)
        alone.x, alone.ids, alone.topk_weights = one.x[part], one.ids[part].contiguous(), one.topk_weights[part]
        alone.out = torch.full((3, 1064), torch.nan)
        assert torch.equal(alone.run(ffn), together[token])


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_thread_count_changes_no_bit(case, ffn, threads):
    one = case(21, 264, 200)
    with HostFFN(threads=threads, isa=ffn.isa, oversubscribe=True) as other:
        assert torch.equal(one.run(other), one.run(ffn))


def test_runs_are_bit_equal(case, ffn):
    one = case(21, 264, 200)
    first = one.run(ffn)
    assert all(torch.equal(one.run(ffn), first) for _ in range(20))
