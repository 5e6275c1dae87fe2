"""The sum at the end of a layer: its order is fixed, so float32 results equal the twin's to the bit."""

import pytest
import torch

from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.reference import combine_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
T, TOPK, H = 5, 4, 40


def inputs(rng, dtype=torch.float32, width=H):
    pairs = torch.randn(T * TOPK, width, generator=rng)
    return pairs, torch.randn(T, width, generator=rng).to(dtype), torch.randn(T, width, generator=rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [H, 600], ids=["odd_width", "three_blocks"])
@pytest.mark.parametrize("extras", [(), ("shared",), ("partial",), ("shared", "partial")], ids=lambda e: "+".join(e) or "pairs")
def test_equals_reference_to_the_bit(extras, width, dtype, guard, rng):
    pairs, shared, partial = inputs(rng, dtype, width)
    given = {name: value for name, value in (("shared", shared), ("partial", partial)) if name in extras}
    want = torch.empty(T, width, dtype=dtype)
    combine_ref(pairs, TOPK, want, **given)
    out = guard(torch.full((T, width), float("nan"), dtype=dtype))
    combine(guard(pairs), TOPK, out, **{name: guard(value) for name, value in given.items()})
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("with_slots", [False, True])
def test_absent_pairs_are_not_read(with_slots, guard, rng):
    pairs, shared, _ = inputs(rng)
    ids = torch.randint(0, 6, (T, TOPK), generator=rng)
    ids[0, 2] = ids[3, :] = -1
    slot_of = torch.tensor([3, -1, 0, 1, -1, 2], dtype=torch.int32) if with_slots else None
    absent = (ids < 0) if slot_of is None else ((ids < 0) | (slot_of[ids.clamp(min=0)] < 0))
    want = torch.empty(T, H)
    combine_ref(pairs, TOPK, want, shared, topk_ids=ids, slot_of=slot_of)
    pairs[absent.flatten()] = float("nan")
    out = guard(torch.full((T, H), float("nan")))
    combine(guard(pairs), TOPK, out, guard(shared), topk_ids=guard(ids), slot_of=None if slot_of is None else guard(slot_of))
    assert torch.equal(out.cpu(), want)


def test_the_order_is_k_upwards(device):
    """1 + 2**30 - 2**30 is 0 in float32 only when 1 is lost first."""
    pairs = torch.tensor([[1.0], [2.0**30], [-(2.0**30)], [4.0]], device=device).repeat(1, 16)
    out = torch.empty(1, 16, device=device)
    combine(pairs, 4, out)
    assert (out == 4).all()


def test_no_token(device):
    combine(torch.empty(0, 8, device=device), 3, torch.empty(0, 8, device=device))


def test_refusals(device):
    pairs, out = torch.ones(6, 8, device=device), torch.empty(3, 8, device=device)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"pairs: got shape \[6, 8\], wanted \[9, 8\]"):
        combine(pairs, 3, out)
    with pytest.raises(TypeError, match="pairs: got torch.float16, wanted torch.float32"):
        combine(pairs.half(), 2, out)
    with pytest.raises(ValueError, match=r"shared: got shape \[2, 8\], wanted \[3, 8\]"):
        combine(pairs, 2, out, out[:2])
    with pytest.raises(ValueError, match="slot_of: came without topk_ids"):
        combine(pairs, 2, out, slot_of=torch.zeros(4, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match="topk_ids: got torch.float32"):
        combine(pairs, 2, out, topk_ids=ids.float())
