"""The end of a MoE layer: each token's sum over its chosen experts, in fp32, in an order that never changes.

    out[t] = (((pairs[t, 0] + pairs[t, 1]) + ...) + partial[t]) + shared[t]

pairs hold what GPU and CPU wrote, each row by one of them; partial is what the CPU summed itself (long prefills only).
"""

import triton
import triton.language as tl


@triton.jit
def _combine_kernel(
    pairs_ptr,  # [T*TOPK, H] fp32; rows of absent pairs are not read
    topk_ids_ptr,  # [T, TOPK] int, -1 is padding; or None: every pair is present
    slot_of_ptr,  # [E] int32, -1: the pair is absent; or None
    partial_ptr,  # [T, H], or None
    shared_ptr,  # [T, H], or None
    out_ptr,  # [T, H]
    H,
    stride_pt,
    stride_st,
    stride_ot,
    TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (T, cdiv(H, BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOPK):
        pair = token * TOPK + k
        width = H
        if topk_ids_ptr is not None:
            expert = tl.load(topk_ids_ptr + pair)
            if slot_of_ptr is not None:
                expert = tl.load(slot_of_ptr + expert, mask=expert >= 0, other=-1)
            width = tl.where(expert >= 0, H, 0)
        acc += tl.load(pairs_ptr + pair * H + offs_h, mask=offs_h < width, other=0.0).to(tl.float32)
    if partial_ptr is not None:
        acc += tl.load(partial_ptr + token * stride_pt + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        acc += tl.load(shared_ptr + token * stride_st + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_ot + offs_h, acc.to(out_ptr.dtype.element_ty), mask=mask_h)
