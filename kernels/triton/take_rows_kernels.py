"""Rows that the CPU computed, from mapped host memory to their place among a layer's pairs.

    pairs[p] = host[p]  for every pair p whose expert is marked; other rows are neither read nor written
"""

import triton
import triton.language as tl


@triton.jit
def _take_rows_kernel(
    host_ptr,  # [T*TOPK, H] fp32, host memory that the device sees
    topk_ids_ptr,  # [T*TOPK] int
    mark_ptr,  # [E] int32, -1: the expert did not run on the CPU
    pairs_ptr,  # [T*TOPK, H] fp32
    H,
    BLOCK_H: tl.constexpr,
):
    """Grid (T*TOPK, cdiv(H, BLOCK_H))."""
    pair = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    expert = tl.load(topk_ids_ptr + pair)
    mark = tl.load(mark_ptr + expert, mask=expert >= 0, other=-1)
    mask = offs_h < tl.where(mark >= 0, H, 0)
    row = tl.load(host_ptr + pair * H + offs_h, mask=mask, cache_modifier=".cg")
    tl.store(pairs_ptr + pair * H + offs_h, row, mask=mask)
