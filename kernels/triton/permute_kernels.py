"""Rows into expert order and back, as kernels of their own; the engine's GEMMs do both in their loads and stores.

    permute:    out[i] = x[rows[i] // TOPK]
    invert:     place[rows[i]] = i
    unpermute:  out[t] = sum over k, upwards, of weights[t, k] * y[place[t*TOPK + k]]

Rows of -1 (no pair) and places of -1 (pair not among the rows) take no part.
"""

import triton
import triton.language as tl


@triton.jit
def _permute_kernel(
    x_ptr,  # [T, H]
    rows_ptr,  # [n] int32, -1 for none
    out_ptr,  # [n, H]
    H,
    stride_xt,
    TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (n, cdiv(H, BLOCK_H))."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(rows_ptr + row)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs_h < tl.where(pair >= 0, H, 0)
    token = (pair // TOPK).to(tl.int64)
    tl.store(out_ptr + row * H + offs_h, tl.load(x_ptr + token * stride_xt + offs_h, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n"])  # changes from step to step
def _invert_kernel(
    rows_ptr,  # [n] int32, -1 for none
    place_ptr,  # [TK] int32, filled with -1 before
    n,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(n, BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(rows_ptr + index, mask=index < n, other=-1)
    tl.store(place_ptr + pair, index, mask=pair >= 0)


@triton.jit
def _unpermute_kernel(
    y_ptr,  # [n, H]
    place_ptr,  # [TK] int32, -1 for none
    weights_ptr,  # [TK] fp32
    out_ptr,  # [T, H]
    H,
    stride_yn,
    TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (T, cdiv(H, BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOPK):
        place = tl.load(place_ptr + token * TOPK + k)
        mask = offs_h < tl.where(place >= 0, H, 0)
        y = tl.load(y_ptr + place.to(tl.int64) * stride_yn + offs_h, mask=mask, other=0.0).to(tl.float32)
        acc += y * tl.load(weights_ptr + token * TOPK + k)
    tl.store(out_ptr + token * H + offs_h, acc.to(out_ptr.dtype.element_ty), mask=offs_h < H)
