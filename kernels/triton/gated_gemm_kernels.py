"""First half of a MoE layer: grouped GEMM over gate and up weights in pool slots, joined by the activation.

    h[r] = act(x[src(r)] @ gate[s].T + b) * (x[src(r)] @ up[s].T + b)     src(r) = rows[r] // TOPK with GATHER, else r

r runs over the rows of a group, s is the group's slot. One piece of work is a tile of BLOCK_M rows of one group by
BLOCK_N columns; tiles without a group or a slot are skipped. A row is computed from its own data only, in an order that
the tile's shape fixes, so results do not depend on which other rows or groups the launch has.
"""

import triton
import triton.language as tl

from .gemm_parts import _activate, _dot, _load_rows, _place, _slot_of_group, _when_ready


@triton.jit
def _gated_tile(
    work, x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr, slot_of_ptr,
    ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
    TOPK: tl.constexpr, GATHER: tl.constexpr, MAPPED: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP_AB: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, block_n = _place(work, num_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    group = tl.load(tile_group_ptr + tile)
    slot = _slot_of_group(group, slot_of_ptr, MAPPED)
    if ready_ptr is not None:
        if slot >= 0:
            slot = _when_ready(slot, ready_ptr, epoch, max_polls, late_ptr)
    if slot >= 0:
        offs_m = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
        mask_m = offs_m < tl.load(offsets_ptr + group + 1)
        offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        offs_k = tl.arange(0, BLOCK_K)

        source = offs_m
        if GATHER:
            pair = tl.load(rows_ptr + offs_m, mask=mask_m, other=0)
            source = pair // TOPK
            if weights_ptr is not None:
                weight = tl.load(weights_ptr + pair, mask=mask_m, other=0.0)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
        gate_ptrs = w_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
        up_ptrs = w_ptr + slot * stride_ws + (offs_n + N).to(tl.int64)[:, None] * K + offs_k[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = _load_rows(x_ptrs, offs_k, mask_m, k, K, EVEN_K)
            if weights_ptr is not None:
                x = (x.to(tl.float32) * weight[:, None]).to(x_ptr.dtype.element_ty)
            gate = _dot(x, _load_rows(gate_ptrs, offs_k, mask_n, k, K, EVEN_K), gate, PRECISION, SWAP_AB)
            up = _dot(x, _load_rows(up_ptrs, offs_k, mask_n, k, K, EVEN_K), up, PRECISION, SWAP_AB)
            x_ptrs += BLOCK_K
            gate_ptrs += BLOCK_K
            up_ptrs += BLOCK_K
        if SWAP_AB:
            gate = tl.trans(gate)
            up = tl.trans(up)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + slot * stride_bs + offs_n
            gate += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptrs + N, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        h = _activate(gate, up, ACTIVATION)
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


# Counts that change from step to step are not specialised on: a value of 1, or one divisible by 16, would compile anew.
@triton.jit(do_not_specialize=["num_tiles", "epoch", "max_polls"])
def _gated_gemm_kernel(
    x_ptr,  # [T, K] with GATHER, else [n, K] in group order
    w_ptr,  # [S, 2N, K] gate rows, then up rows; rows K apart, slots stride_ws apart
    bias_ptr,  # [S, 2N], or None
    weights_ptr,  # [TK] fp32 by pair: multiplied into x, which is rounded again; or None
    out_ptr,  # [n, N] in group order
    rows_ptr,  # [n] int32 pair of each row; not read without GATHER
    offsets_ptr,  # [G+1] int32
    tile_group_ptr,  # [num_tiles] int32, -1 for none
    tile_row_ptr,  # [num_tiles] int32
    slot_of_ptr,  # [G] int32, -1 for none; not read unless MAPPED
    ready_ptr,  # [S] int32 epoch of the last copy into each slot, or None: everything is there already
    late_ptr,  # [1] int32 out, set to 1 where waiting was given up
    epoch,
    max_polls,
    num_tiles,
    N,
    K,
    stride_xm,
    stride_ws,
    stride_bs,
    TOPK: tl.constexpr,
    GATHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (num_tiles * cdiv(N, BLOCK_N),); with PERSISTENT any smaller one, each program then takes several pieces."""
    if PERSISTENT:
        for work in range(tl.program_id(0), num_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            _gated_tile(
                work, x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr,
                slot_of_ptr, ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
                TOPK, GATHER, MAPPED, ACTIVATION, PRECISION, EVEN_K, SWAP_AB, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _gated_tile(
            tl.program_id(0), x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr,
            slot_of_ptr, ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
            TOPK, GATHER, MAPPED, ACTIVATION, PRECISION, EVEN_K, SWAP_AB, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
