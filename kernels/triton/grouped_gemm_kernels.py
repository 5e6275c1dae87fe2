"""Second half of a MoE layer, and the plain case: grouped GEMM over weights in pool slots.

    y[dst(r)] = weight[dst(r)] * (x[r] @ w[s].T + b)     dst(r) = rows[r] with SCATTER, else r; weights are optional

r runs over the rows of a group, s is the group's slot; tiles and order of work are those of `gated_gemm_kernels.py`.
With SCATTER each pair's row is written by exactly one tile, so phases fill one output without locks.
"""

import triton
import triton.language as tl

from .gemm_parts import _dot, _load_rows, _place, _slot_of_group, _when_ready


@triton.jit
def _grouped_tile(
    work, x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr, slot_of_ptr,
    ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
    SCATTER: tl.constexpr, MAPPED: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr, SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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

        x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
        w_ptrs = w_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = _load_rows(x_ptrs, offs_k, mask_m, k, K, EVEN_K)
            acc = _dot(x, _load_rows(w_ptrs, offs_k, mask_n, k, K, EVEN_K), acc, PRECISION, SWAP_AB)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
        if SWAP_AB:
            acc = tl.trans(acc)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + slot * stride_bs + offs_n, mask=mask_n, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        target = offs_m
        if SCATTER:
            target = tl.load(rows_ptr + offs_m, mask=mask_m, other=0)
        if weights_ptr is not None:
            acc *= tl.load(weights_ptr + target, mask=mask_m, other=0.0)[:, None]
        out_ptrs = out_ptr + target.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["num_tiles", "epoch", "max_polls"])  # see gated_gemm_kernels.py
def _grouped_gemm_kernel(
    x_ptr,  # [n, K] in group order
    w_ptr,  # [S, N, K]; rows K apart, slots stride_ws apart
    bias_ptr,  # [S, N], or None
    weights_ptr,  # [TK] fp32 by pair, or None
    out_ptr,  # [TK, N] by pair with SCATTER, else [n, N] in group order
    rows_ptr,  # [n] int32 pair of each row; not read without SCATTER
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
    SCATTER: tl.constexpr,
    MAPPED: tl.constexpr,
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
            _grouped_tile(
                work, x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr,
                slot_of_ptr, ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
                SCATTER, MAPPED, PRECISION, EVEN_K, SWAP_AB, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _grouped_tile(
            tl.program_id(0), x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, rows_ptr, offsets_ptr, tile_group_ptr, tile_row_ptr,
            slot_of_ptr, ready_ptr, late_ptr, epoch, max_polls, num_tiles, N, K, stride_xm, stride_ws, stride_bs,
            SCATTER, MAPPED, PRECISION, EVEN_K, SWAP_AB, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
