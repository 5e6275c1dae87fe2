"""One summed row a token in place of one row a pair."""

import pytest
import torch

from apexk.kernels.cpu.ffn import HostFFN


def summed(one, ffn, **options) -> torch.Tensor:
    out = torch.full_like(one.x, torch.nan, dtype=torch.float32)
    ffn.run(*one.arguments()[:-1], out, intermediate=one.intermediate, biases=one.biases, summed=True, **options)
    return out


def added(one, ffn, **options) -> torch.Tensor:
    """The rows by pair, which other tests check, added up one by one in the promised order."""
    rows = one.run(ffn, **options).nan_to_num().view(*one.ids.shape, one.hidden)
    total = torch.zeros_like(rows[:, 0])
    for place in one.ids.argsort(dim=1, stable=True).unbind(dim=1):
        total += rows[torch.arange(one.tokens), place]
    return total


@pytest.mark.parametrize("tokens", [1, 7, 33, 230])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values(case, ffn, tokens, dtype):
    one = case(tokens, 100, 72, dtype=dtype, biases=True)
    got = summed(one, ffn)
    want = one.expected().view(tokens, 3, 100).sum(dim=1)
    assert (got - want).abs().max() <= (2e-3 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()
    assert torch.equal(got, added(one, ffn))


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_thread_count_changes_no_bit(case, ffn, threads):
    one = case(150, 264, 200, experts=4)
    want = summed(one, ffn)
    with HostFFN(threads=threads, isa=ffn.isa, oversubscribe=True) as other:
        assert all(torch.equal(summed(one, other), want) for _ in range(5))


def test_a_token_does_not_depend_on_its_neighbours(case, ffn):
    """Expert 5 is the busiest in the whole call, which would put it first were the order that of the loads."""
    one = case(40, 72, 64)
    one.ids[0], one.ids[1:] = torch.tensor([1, 5, 0]), torch.tensor([5, 3, 4])
    together = summed(one, ffn)
    alone = case(1, 72, 64)
    alone.weights, alone.blocks = one.weights, one.blocks
    alone.x, alone.ids, alone.topk_weights = one.x[:1], one.ids[:1].clone(), one.topk_weights[:1].clone()
    assert torch.equal(summed(alone, ffn)[0], together[0])


def test_tokens_without_a_wanted_expert_are_zero(case, ffn):
    one = case(9, 64, 32, wanted=[4, 1])
    one.ids[3:6] = torch.tensor([0, 2, 5])
    got = summed(one, ffn)
    none = ~((one.ids == 1) | (one.ids == 4)).any(dim=1)
    assert not none.all() and torch.equal(got.abs().sum(dim=1) == 0, none)
    assert torch.equal(got, added(one, ffn))
    one.wanted.clear()
    assert torch.equal(summed(one, ffn), torch.zeros(9, 64))


def test_the_order_of_the_experts_asked_for_does_not_matter(case, ffn):
    one = case(20, 64, 32)
    want = summed(one, ffn)
    one.wanted.reverse()
    assert torch.equal(summed(one, ffn), want)


def test_duplicate_ids_are_both_added(case, ffn):
    """Also where a unit of work ends between them."""
    one = case(200, 64, 32)
    one.ids[:] = torch.tensor([2, 2, 5])
    assert torch.equal(summed(one, ffn), added(one, ffn))


def test_no_tokens(case, ffn):
    assert summed(case(0, 64, 32), ffn).shape == (0, 64)


@pytest.mark.parametrize("shape", [(15, 64), (5, 63)])
def test_out_of_another_shape(case, ffn, shape):
    one = case(5, 64, 32)
    out = torch.full(shape, torch.nan)
    with pytest.raises(ValueError, match=r"out must have shape \(5, 64\)"):
        ffn.run(*one.arguments()[:-1], out, intermediate=32, summed=True)
    assert out.isnan().all()


def test_submitted(case, ffn):
    one = case(33, 100, 72)
    out = torch.full((33, 100), torch.nan)
    ffn.submit(*one.arguments()[:-1], out, intermediate=72, summed=True).wait()
    assert torch.equal(out, summed(one, ffn))
