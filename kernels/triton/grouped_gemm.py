"""Grouped GEMMs by slot: `grouped_gemm` and `gated_gemm` for rows in group order, and the launches that `moe_ffn` joins."""

import torch

from .checks import FLOATS, check, check_choice, check_launchable, check_weights
from .reference import ACTIVATIONS, Routing
from .routing import list_tiles
from .tune import Tile, choose_tile, target_of

PRECISIONS = ("ieee", "tf32")


def grouped_gemm(x, w, offsets, *, bias=None, out=None, tile: Tile | None = None, precision="ieee"):
    """x [n, K] in slot order, w [S, N, K], offsets int32 [S+1] -> [n, N]; see `grouped_gemm_ref`."""
    check("x", x, ("n", "K"), FLOATS, rows_contiguous=True)
    check_weights("w", w, ("S", "N", x.shape[1]), x)
    slots, n_out, k = w.shape
    out = _prepare(x, offsets, slots, n_out, bias, n_out, out, precision)
    if x.shape[0] == 0:
        return out
    tile = tile or choose_tile("down", x.shape[0], slots, n_out, k, x.dtype, target_of(x.device))
    launch_grouped(x, w, out, _grouped(offsets, x.shape[0], tile), tile, bias=bias, precision=precision)
    return out


def gated_gemm(x, w13, offsets, activation="silu", *, bias=None, out=None, tile: Tile | None = None, precision="ieee"):
    """x [n, H] in slot order, w13 [S, 2I, H], offsets int32 [S+1] -> act(gate) * up [n, I]; see `gated_gemm_ref`."""
    check("x", x, ("n", "H"), FLOATS, rows_contiguous=True)
    check_weights("w13", w13, ("S", "2I", x.shape[1]), x)
    check_choice("activation", activation, ACTIVATIONS)
    slots, both, hidden = w13.shape
    if both % 2:
        raise ValueError(f"w13: has {both} rows an expert, wanted an even number (gate rows, then up rows)")
    out = _prepare(x, offsets, slots, both, bias, both // 2, out, precision)
    if x.shape[0] == 0:
        return out
    tile = tile or choose_tile("gated", x.shape[0], slots, both // 2, hidden, x.dtype, target_of(x.device))
    routing = _grouped(offsets, x.shape[0], tile)
    launch_gated(x, w13, out, routing, tile, activation, bias=bias, precision=precision)
    return out


def launch_gated(x, w13, out, routing: Routing, tile: Tile, activation, *, topk=None, slot_of=None, bias=None,
                 precision="ieee"):
    """The gated kernel, unchecked. With `topk` x holds tokens, gathered by routing.rows; with `slot_of` groups are experts."""
    from .grouped_gemm_kernels import _gated_gemm_kernel

    n, k = w13.shape[1] // 2, w13.shape[2]
    tiles = routing.tile_group.numel()
    _gated_gemm_kernel[(tiles * -(-n // tile.block_n),)](
        x, w13, bias, out, routing.rows, routing.offsets, routing.tile_group, routing.tile_row, slot_of,
        tiles, n, k, x.stride(0), w13.stride(0), 0 if bias is None else bias.stride(0),
        TOPK=topk or 1, GATHER=topk is not None, MAPPED=slot_of is not None, ACTIVATION=activation,
        PRECISION=precision, **_launch_values(tile, k),
    )  # fmt: skip


def launch_grouped(x, w, out, routing: Routing, tile: Tile, *, weights=None, slot_of=None, bias=None, precision="ieee"):
    """The plain kernel, unchecked. With `weights` (fp32, by pair) rows are scaled and written at their pair's index."""
    from .grouped_gemm_kernels import _grouped_gemm_kernel

    n, k = w.shape[1], w.shape[2]
    tiles = routing.tile_group.numel()
    _grouped_gemm_kernel[(tiles * -(-n // tile.block_n),)](
        x, w, bias, weights, out, routing.rows, routing.offsets, routing.tile_group, routing.tile_row, slot_of,
        tiles, n, k, x.stride(0), w.stride(0), 0 if bias is None else bias.stride(0),
        SCATTER=weights is not None, MAPPED=slot_of is not None, PRECISION=precision, **_launch_values(tile, k),
    )  # fmt: skip


def _launch_values(tile: Tile, k):
    return dict(
        EVEN_K=k % tile.block_k == 0, SWAP_AB=tile.swap_ab, GROUP_M=tile.group_m,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _prepare(x, offsets, slots, bias_width, bias, out_width, out, precision):
    check("offsets", offsets, (slots + 1,), (torch.int32,), like=x)
    check_choice("precision", precision, PRECISIONS)
    if bias is not None:
        check("bias", bias, (slots, bias_width), (x.dtype,), like=x, rows_contiguous=True)
    if out is None:
        out = torch.empty(x.shape[0], out_width, dtype=x.dtype, device=x.device)
    check("out", out, (x.shape[0], out_width), (x.dtype,), like=x)
    check_launchable(x)
    return out


def _grouped(offsets, rows, tile) -> Routing:
    tile_group, tile_row = list_tiles(offsets, rows, tile.block_m)
    return Routing(None, offsets, None, tile_group, tile_row, tile.block_m)
