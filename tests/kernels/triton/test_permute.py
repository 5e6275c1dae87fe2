"""Gather into expert order and its inverse; moving rows changes no bit."""

import pytest
import torch

from apexk.kernels.triton.permute import permute, unpermute
from apexk.kernels.triton.reference import permute_ref, route_ref, unpermute_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E = 5


def grouped_rows(ids, absent=()):
    """Rows of the pairs whose expert is present, and the same with a tail of -1 as a kernel returns it."""
    slot_of = torch.arange(E, dtype=torch.int32)
    slot_of[list(absent)] = -1
    rows = route_ref(ids, slot_of, E).rows
    return rows, torch.cat([rows, torch.full((ids.numel() - rows.numel(),), -1, dtype=torch.int32)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, topk, H", [(1, 1, 16), (6, 3, 40), (3, 2, 600)], ids=["smallest", "odd_width", "two_blocks"])
def test_permute_moves_rows(T, topk, H, dtype, guard, rng):
    ids = torch.randint(0, E, (T, topk), generator=rng)
    x = torch.randn(T, H, generator=rng).to(dtype)
    rows, padded = grouped_rows(ids, absent=[1])
    out = guard(torch.full((T * topk, H), 5.0, dtype=dtype))
    permute(guard(x), guard(padded), topk, out=out)
    assert torch.equal(out[: len(rows)].cpu(), permute_ref(x, rows, topk))
    assert (out[len(rows) :] == 5).all(), "rows of no pair were written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absent", [(), (1, 3), range(E)], ids=["all", "some_absent", "none"])
def test_unpermute_is_the_weighted_inverse(absent, dtype, guard, rng, close):
    T, topk, H = 6, 3, 40
    ids = torch.randint(0, E, (T, topk), generator=rng)  # duplicates within a token happen
    ids[2, 1] = -1
    weights = torch.rand(T, topk, generator=rng)
    rows, padded = grouped_rows(ids, absent)
    y = torch.randn(T * topk, H, generator=rng).to(dtype)
    y[len(rows) :] = float("nan")
    out = guard(torch.full((T, H), float("nan"), dtype=dtype))
    unpermute(guard(y), guard(padded), guard(weights), T, out=out)
    close(out, unpermute_ref(y[: len(rows)], rows, weights, T), dtype)


def test_there_and_back_is_exact(device, rng):
    """Weights of 1/topk with a power of two: the sum of equal parts is the row itself, to the bit."""
    x, ids = torch.randn(9, 64, generator=rng), torch.randint(0, E, (9, 4), generator=rng)
    rows, _ = grouped_rows(ids)
    moved = permute(x.to(device), rows.to(device), 4)
    assert torch.equal(unpermute(moved, rows.to(device), torch.full((9, 4), 0.25, device=device), 9).cpu(), x)


def test_rows_of_x_may_be_apart(device, rng):
    wide, rows = torch.randn(4, 50, generator=rng), torch.tensor([3, 0, 2], dtype=torch.int32)
    assert torch.equal(permute(wide[:, 5:37].to(device), rows.to(device), 1).cpu(), wide[:, 5:37][[3, 0, 2]])


def test_nothing_to_move(device):
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert permute(torch.empty(0, 8, device=device), none, 2).shape == (0, 8)
    assert unpermute(torch.empty(0, 8, device=device), none, torch.empty(0, 2, device=device), 0).shape == (0, 8)
    assert torch.equal(unpermute(torch.empty(0, 8, device=device), none, torch.ones(3, 2, device=device), 3).cpu(), torch.zeros(3, 8))


def test_refusals(device):
    x, rows = torch.ones(4, 8, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="rows: got torch.int64, wanted torch.int32"):
        permute(x, rows.long(), 2)
    with pytest.raises(ValueError, match="x: its last axis has stride 8, wanted 1"):
        permute(torch.ones(4, 64, device=device)[:, ::8], rows, 2)
    with pytest.raises(ValueError, match="topk = 0, wanted at least 1"):
        permute(x, rows, 0)
    with pytest.raises(ValueError, match=r"out: got shape \[3, 8\], wanted \[4, 8\]"):
        permute(x, rows, 2, out=x[:3])
    with pytest.raises(ValueError, match=r"topk_weights: got shape \[4, 1\], wanted \[2, topk\]"):
        unpermute(x, rows, torch.ones(4, 1, device=device), 2)
