"""A linear layer against float64, for every instruction set that this machine runs: values, threads, strides, refusals."""

import gc
import itertools

import pytest
import torch

from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.linear import Prepared, linear

# none and one; groups of tokens and one more; where panels begin; one beyond a unit; several units
TOKENS = [0, 1, 2, 3, 7, 33, 41, 145, 400]
OUTPUTS = [1, 3, 17, 64, 513]
INPUTS = [1, 5, 32, 100, 2048]
#: what sums in float32 may lose, of the sum of the magnitudes that are added; bf16 products of AMX also flush denormals
SUMS = 2e-6


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(y, x, weight, bias=None):
    """Within half a step of `y`'s dtype of what float64 gives, and what float32 sums lose."""
    assert y.dtype == x.dtype and y.shape == (x.shape[0], weight.shape[0]) and y.is_contiguous()
    x, weight = x.double(), weight.double()
    want, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    half = torch.finfo(y.dtype).eps / 2 * want.abs().clamp(min=torch.finfo(y.dtype).tiny)
    assert ((y.double() - want).abs() <= half + SUMS * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inputs", INPUTS)
def test_values(ffn, inputs, dtype):
    """Every number of tokens with every number of rows, in turn with and without a bias."""
    for number, (outputs, tokens) in enumerate(itertools.product(OUTPUTS, TOKENS)):
        x, weight = normal(tokens, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1)
        bias = normal(outputs, dtype=dtype, seed=2) if number % 2 else None
        check(linear(ffn, x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("with_torch", [False, True])
def test_threads_and_neighbours_change_no_bit(ffn, threads, with_torch):
    x, weight = normal(145, 1064), normal(200, 1064, seed=1)
    together = linear(ffn, x, weight)
    with HostFFN(threads=threads, isa=ffn.isa, oversubscribe=True) as other:
        assert torch.equal(linear(other, x, weight, with_torch=with_torch), together)
        for token in (0, 7, 144):
            assert torch.equal(linear(other, x[token : token + 1], weight, with_torch=with_torch)[0], together[token])


def test_rows_may_lie_apart(ffn):
    wide, weight = normal(33, 300), normal(17, 100, seed=1)
    for x in (wide[:, :100], wide[:, 200:], wide[::3, :100], wide[:1, 100:200]):
        check(linear(ffn, x, weight), x, weight)
        assert torch.equal(linear(ffn, x, weight), linear(ffn, x.contiguous(), weight))


def test_values_that_are_no_numbers_stay_in_their_row(ffn):
    x, weight = normal(3, 40), normal(17, 40, seed=1)
    clean = linear(ffn, x, weight)
    x[1, 39] = torch.nan
    got = linear(ffn, x, weight)
    assert got[1].isnan().all() and torch.equal(got[::2], clean[::2])


def test_what_rounds_beyond_the_largest_number_is_infinite(ffn):
    x, weight = torch.full((1, 8), 200.0, dtype=torch.float16), torch.full((2, 8), 200.0, dtype=torch.float16)
    weight[1] *= -1
    assert linear(ffn, x, weight).tolist() == [[torch.inf, -torch.inf]]


def test_many_layers_share_the_scratch(ffn):
    """Calls of other sizes one after the other, larger and smaller: what one left must not show in the next."""
    for tokens, outputs, inputs in [(1, 8, 16), (300, 64, 700), (2, 3, 5), (400, 9, 33), (1, 513, 2048)]:
        x, weight = normal(tokens, inputs), normal(outputs, inputs, seed=1)
        check(linear(ffn, x, weight), x, weight)


X, W, B = (3, 8), (4, 8), (4,)


@pytest.mark.parametrize(("x", "weight", "bias", "error", "text"), [
    pytest.param([[1.0]], torch.zeros(W), None, TypeError, "tensors", id="no tensor"),
    pytest.param(torch.zeros(X), torch.zeros(W).bfloat16(), None, TypeError, "all of one", id="two dtypes"),
    pytest.param(torch.zeros(X), torch.zeros(W), torch.zeros(B).half(), TypeError, "all of one", id="bias of another dtype"),
    pytest.param(torch.zeros(X).double(), torch.zeros(W).double(), None, TypeError, "float64", id="float64"),
    pytest.param(torch.zeros(X, device="meta"), torch.zeros(W), None, ValueError, "on the CPU", id="elsewhere"),
    pytest.param(torch.zeros(2, 3, 8), torch.zeros(W), None, ValueError, "x must be", id="three dimensions"),
    pytest.param(torch.zeros(3, 7), torch.zeros(W), None, ValueError, "x must be", id="other widths"),
    pytest.param(torch.zeros(3, 0), torch.zeros(4, 0), None, ValueError, "at least one", id="no column"),
    pytest.param(torch.zeros(X), torch.zeros(0, 8), None, ValueError, "at least one", id="no row"),
    pytest.param(torch.zeros(X), torch.zeros(8, 4).T, None, ValueError, "contiguous", id="transposed weight"),
    pytest.param(torch.zeros(X), torch.zeros(W), torch.zeros(8)[::2], ValueError, "contiguous", id="strided bias"),
    pytest.param(torch.zeros(X), torch.zeros(W), torch.zeros(3), ValueError, "bias must have shape", id="short bias"),
    pytest.param(torch.zeros(8, 3).T, torch.zeros(W), None, ValueError, "contiguous rows", id="strided elements"),
    pytest.param(torch.zeros(1, 8).expand(3, 8), torch.zeros(W), None, ValueError, "overlap", id="one row three times"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(x, weight, bias, error, text):
    with HostFFN(threads=1) as ffn, pytest.raises(error, match=text):
        linear(ffn, x, weight, bias)


@pytest.mark.parametrize(("weight", "bias", "error"), [
    pytest.param([[1.0]], None, TypeError, id="no tensor"),
    pytest.param(torch.zeros(4), None, ValueError, id="one dimension"),
    pytest.param(torch.zeros(8, 4).T, None, ValueError, id="transposed"),
    pytest.param(torch.zeros(W), torch.zeros(B).half(), TypeError, id="bias of another dtype"),
])  # fmt: skip
def test_what_cannot_be_prepared_is_refused(weight, bias, error):
    with HostFFN(threads=1) as ffn, pytest.raises(error):
        Prepared(ffn, weight, bias)


@pytest.mark.parametrize("with_torch", [False, True])
def test_prepared_layers_give_the_same_bits(ffn, with_torch):
    weight, bias = normal(17, 100, seed=1), normal(17, seed=2)
    for own in (None, bias):
        prepared = Prepared(ffn, weight, own, with_torch=with_torch)
        for shape in ((3, 100), (0, 100), (2, 7, 100), (1, 1, 100), (100,), (300, 100)):
            x, y = normal(*shape), torch.full((*shape[:-1], 17), torch.nan, dtype=torch.bfloat16)
            prepared(x, y)
            assert torch.equal(y, linear(ffn, x.view(-1, 100), weight, own).view(y.shape))


def test_prepared_layers_know_their_weight(ffn):
    weight, bias = normal(16, 16, seed=1), normal(16, seed=2)
    prepared = Prepared(ffn, weight, bias)
    weight.fill_(1.0)
    assert prepared.holds(weight, bias) and prepared.holds(weight.detach(), bias.view(16))
    others = [(weight.clone(), bias), (weight, None), (weight, bias.clone()), (weight.T, bias), (weight[:8], bias), (weight.view(torch.float16), bias), (weight.view(-1), bias)]
    assert not any(prepared.holds(*other) for other in others)


def test_a_closed_pool_is_refused():
    ffn = HostFFN(threads=1)
    ffn.close()
    gc.collect()
    with pytest.raises(ValueError, match="closed"):
        linear(ffn, torch.zeros(X), torch.zeros(W))
