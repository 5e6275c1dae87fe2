"""Ragged grouped GEMMs whose weights lie in pool slots, with the work of a MoE layer in their loads and epilogues.

    gated:  h[r] = act(x[src(r)] @ gate[s].T + b) * (x[src(r)] @ up[s].T + b)     src(r) = rows[r] // TOPK with GATHER, else r
    down:   y[dst(r)] = weight[dst(r)] * (x[r] @ w[s].T + b)                      dst(r) = rows[r] with SCATTER, else r

r runs over the rows of a group, s is the group's slot. A program takes one tile of BLOCK_M rows of one group and BLOCK_N
columns; tiles without a group or a slot end at once. Each row is computed from its own data only, in an order that the
tile's shape fixes, so results do not depend on which other rows or groups the launch has.
"""

import triton
import triton.language as tl

from . import reference

OSS_ALPHA = tl.constexpr(reference.OSS_ALPHA)
OSS_LIMIT = tl.constexpr(reference.OSS_LIMIT)
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


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


@triton.jit
def _place(num_tiles, num_blocks_n, GROUP_M: tl.constexpr):
    """(tile, column block) of this program: GROUP_M tiles by all columns, so that neighbours share weights in L2."""
    pid = tl.program_id(0)
    per_group = GROUP_M * num_blocks_n
    first = (pid // per_group) * GROUP_M
    height = tl.minimum(num_tiles - first, GROUP_M)
    return first + (pid % per_group) % height, (pid % per_group) // height


@triton.jit
def _slot_of_group(group, slot_of_ptr, MAPPED: tl.constexpr):
    """int64, since slot times stride passes 2**31; -1 where the tile has nothing to do in this launch."""
    if MAPPED:
        return tl.load(slot_of_ptr + group, mask=group >= 0, other=-1).to(tl.int64)
    else:
        return group.to(tl.int64)


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
def _gated_gemm_kernel(
    x_ptr,  # [T, K] with GATHER, else [n, K] in group order
    w_ptr,  # [S, 2N, K] gate rows, then up rows; rows K apart, slots stride_ws apart
    bias_ptr,  # [S, 2N], or None
    out_ptr,  # [n, N] in group order
    rows_ptr,  # [n] int32 pair of each row; not read without GATHER
    offsets_ptr,  # [G+1] int32
    tile_group_ptr,  # [num_tiles] int32, -1 for none
    tile_row_ptr,  # [num_tiles] int32
    slot_of_ptr,  # [G] int32, -1 for none; not read unless MAPPED
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
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (num_tiles * cdiv(N, BLOCK_N),)."""
    tile, block_n = _place(num_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    group = tl.load(tile_group_ptr + tile)
    slot = _slot_of_group(group, slot_of_ptr, MAPPED)
    if slot < 0:
        return
    offs_m = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    mask_m = offs_m < tl.load(offsets_ptr + group + 1)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    offs_k = tl.arange(0, BLOCK_K)

    source = offs_m
    if GATHER:
        source = tl.load(rows_ptr + offs_m, mask=mask_m, other=0) // TOPK
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    gate_ptrs = w_ptr + slot * stride_ws + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    up_ptrs = w_ptr + slot * stride_ws + (offs_n + N).to(tl.int64)[:, None] * K + offs_k[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = _load_rows(x_ptrs, offs_k, mask_m, k, K, EVEN_K)
        gate = _dot(x, _load_rows(gate_ptrs, offs_k, mask_n, k, K, EVEN_K), gate, PRECISION, SWAP_AB)
        up = _dot(x, _load_rows(up_ptrs, offs_k, mask_n, k, K, EVEN_K), up, PRECISION, SWAP_AB)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    if SWAP_AB:
        gate, up = tl.trans(gate), tl.trans(up)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + slot * stride_bs + offs_n
        gate += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + N, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    h = _activate(gate, up, ACTIVATION)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # [n, K] in group order
    w_ptr,  # [S, N, K]; rows K apart, slots stride_ws apart
    bias_ptr,  # [S, N], or None
    weights_ptr,  # [TK] fp32 by pair; not read without SCATTER
    out_ptr,  # [TK, N] by pair with SCATTER, else [n, N] in group order
    rows_ptr,  # [n] int32 pair of each row; not read without SCATTER
    offsets_ptr,  # [G+1] int32
    tile_group_ptr,  # [num_tiles] int32, -1 for none
    tile_row_ptr,  # [num_tiles] int32
    slot_of_ptr,  # [G] int32, -1 for none; not read unless MAPPED
    num_tiles,
    N,
    K,
    stride_xm,
    stride_ws,
    stride_bs,
    SCATTER: tl.constexpr,
    MAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (num_tiles * cdiv(N, BLOCK_N),)."""
    tile, block_n = _place(num_tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    group = tl.load(tile_group_ptr + tile)
    slot = _slot_of_group(group, slot_of_ptr, MAPPED)
    if slot < 0:
        return
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
        acc *= tl.load(weights_ptr + target, mask=mask_m, other=0.0)[:, None]
    out_ptrs = out_ptr + target.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
