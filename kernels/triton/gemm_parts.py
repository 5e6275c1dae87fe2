"""Parts that the two grouped GEMMs share: which tile, which slot, loads, the product, the activation, waiting for a slot."""

import triton
import triton.language as tl

from . import reference

OSS_ALPHA = tl.constexpr(reference.OSS_ALPHA)
OSS_LIMIT = tl.constexpr(reference.OSS_LIMIT)
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _place(work, num_tiles, num_blocks_n, GROUP_M: tl.constexpr):
    """(tile, column block) of one piece of work: GROUP_M tiles by all columns, so that neighbours share weights in L2."""
    per_group = GROUP_M * num_blocks_n
    first = (work // per_group) * GROUP_M
    height = tl.minimum(num_tiles - first, GROUP_M)
    return first + (work % per_group) % height, (work % per_group) // height


@triton.jit
def _slot_of_group(group, slot_of_ptr, MAPPED: tl.constexpr):
    """int64, since slot times stride passes 2**31; -1 where the tile has nothing to do in this launch."""
    if MAPPED:
        return tl.load(slot_of_ptr + group, mask=group >= 0, other=-1).to(tl.int64)
    else:
        return group.to(tl.int64)


@triton.jit
def _when_ready(slot, ready_ptr, epoch, max_polls, late_ptr):
    """The slot once its copy of this epoch has landed; -1 and a mark in `late` where that took too long.

    Whoever copies stores the epoch behind the last byte. Acquire at system scope: the bytes are then seen as well.
    """
    seen = tl.atomic_add(ready_ptr + slot, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen != epoch) & (polls < max_polls):
        seen = tl.atomic_add(ready_ptr + slot, 0, sem="acquire", scope="sys")
        polls += 1
    if seen != epoch:
        tl.store(late_ptr, 1)
    return tl.where(seen == epoch, slot, -1)


@triton.jit
def _load_rows(ptr, offs, mask_rows, k, K, EVEN_K: tl.constexpr):
    """A [rows, BLOCK_K] tile at pointers `ptr`; past K only where EVEN_K does not rule that out."""
    if EVEN_K:
        return tl.load(ptr, mask=mask_rows[:, None], other=0.0)
    else:
        return tl.load(ptr, mask=mask_rows[:, None] & (k + offs < K)[None, :], other=0.0)


@triton.jit
def _dot(x, w, acc, PRECISION: tl.constexpr, SWAP_AB: tl.constexpr):
    """acc + x @ w.T; with SWAP_AB its transpose, weights on the tensor core's M side."""
    if SWAP_AB:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N] each, see `activation_ref`."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF)) * up
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        return gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * SQRT_8_OVER_PI) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oss", "unknown activation")
        gate = tl.minimum(gate, OSS_LIMIT)
        up = tl.minimum(tl.maximum(up, -OSS_LIMIT), OSS_LIMIT)
        return gate * tl.sigmoid(gate * OSS_ALPHA) * (up + 1.0)
