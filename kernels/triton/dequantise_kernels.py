"""Weights out of a payload's codes and scales.

    out[r, j] = code[r, j] * scale[r, j // GROUP]  in fp32, rounded to out's dtype

A row's codes fill whole groups; what lies behind its K weights is neither read into a value nor stored.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)


@triton.jit
def _dequantise_kernel(
    codes_ptr,  # [N, G*GROUP*BITS/8] int8
    scales_ptr,  # [N, G] fp16
    out_ptr,  # [N, K]
    N,
    K,
    G,
    BITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (cdiv(N*G, BLOCK_G),): each program takes BLOCK_G groups, which go on from row to row."""
    WIDTH: tl.constexpr = GROUP * BITS // 8  # bytes of a group, and weights of one store
    offs_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_b = tl.arange(0, WIDTH)
    there = offs_g < N * G
    scale = tl.load(scales_ptr + offs_g, mask=there, other=0.0).to(tl.float32)[:, None]
    codes = tl.load(codes_ptr + offs_g[:, None] * WIDTH + offs_b[None, :], mask=there[:, None], other=0).to(tl.int32)
    first = ((offs_g % G) * GROUP)[:, None] + offs_b[None, :]  # in its row
    place = out_ptr + ((offs_g // G) * K)[:, None] + first
    if BITS == 4:
        low, high = (codes << 28) >> 28, codes >> 4
        mask = there[:, None] & (first + WIDTH < K)
        tl.store(place + WIDTH, (high.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        low = codes
    tl.store(place, (low.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=there[:, None] & (first < K))
