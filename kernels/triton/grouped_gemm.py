"""Grouped GEMMs by slot: `grouped_gemm` and `gated_gemm` for rows in group order, and the launches that `moe_ffn` joins."""

from dataclasses import dataclass

import torch

from .checks import FLOATS, check, check_choice, check_launchable, check_weights
from .reference import ACTIVATIONS, Routing
from .routing import list_tiles
from .tune import Tile, choose_tile, programs, target_of

PRECISIONS = ("ieee", "tf32")


@dataclass
class Arrivals:
    """Slots that may still be loading when the launch starts: a tile waits until its slot's flag holds the epoch.

    The copies must be enqueued before the launch, and each stores the epoch into its slot's flag behind its last byte;
    a new step takes a new epoch, so that nothing has to be cleared. Where a flag does not come within `max_polls`
    looks, the tile is left out and `late` is set to 1: the caller checks it before it uses the result.
    """

    ready: torch.Tensor  # int32 [S]
    epoch: int
    late: torch.Tensor  # int32 [1]
    max_polls: int = 1 << 20  # a look takes about a microsecond


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


def launch_gated(x, w13, out, routing: Routing, tile: Tile, activation, *, topk=None, weights=None, slot_of=None,
                 bias=None, precision="ieee", arrivals: Arrivals | None = None):  # fmt: skip
    """The gated kernel, unchecked. With `topk` x holds tokens, gathered by routing.rows and scaled by `weights` if given;
    with `slot_of` groups are experts."""
    from .gated_gemm_kernels import _gated_gemm_kernel

    n = w13.shape[1] // 2
    grid, values = _launch_values(routing, tile, n, w13.shape[2], x.device)
    _gated_gemm_kernel[grid](
        x, w13, bias, weights, out, routing.rows, routing.offsets, routing.tile_group, routing.tile_row, slot_of,
        *_waiting(arrivals), routing.tile_group.numel(), n, w13.shape[2], x.stride(0), w13.stride(0), _stride(bias),
        TOPK=topk or 1, GATHER=topk is not None, MAPPED=slot_of is not None, ACTIVATION=activation,
        PRECISION=precision, **values,
    )  # fmt: skip


def launch_grouped(x, w, out, routing: Routing, tile: Tile, *, scatter=False, weights=None, slot_of=None, bias=None,
                   precision="ieee", arrivals: Arrivals | None = None):  # fmt: skip
    """The plain kernel, unchecked. With `scatter` rows are written at their pair's index, scaled by `weights` if given."""
    from .grouped_gemm_kernels import _grouped_gemm_kernel

    n = w.shape[1]
    grid, values = _launch_values(routing, tile, n, w.shape[2], x.device)
    _grouped_gemm_kernel[grid](
        x, w, bias, weights, out, routing.rows, routing.offsets, routing.tile_group, routing.tile_row, slot_of,
        *_waiting(arrivals), routing.tile_group.numel(), n, w.shape[2], x.stride(0), w.stride(0), _stride(bias),
        SCATTER=scatter, MAPPED=slot_of is not None, PRECISION=precision, **values,
    )  # fmt: skip


def _launch_values(routing, tile: Tile, n, k, device):
    """(grid, compile-time values) of either kernel."""
    work = routing.tile_group.numel() * -(-n // tile.block_n)
    grid = programs(work, tile, device)
    return (grid,), dict(
        PERSISTENT=grid < work, EVEN_K=k % tile.block_k == 0, SWAP_AB=tile.swap_ab, GROUP_M=tile.group_m,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _waiting(arrivals: Arrivals | None):
    return (None, None, 0, 0) if arrivals is None else (arrivals.ready, arrivals.late, arrivals.epoch, arrivals.max_polls)


def _stride(tensor) -> int:
    return 0 if tensor is None else tensor.stride(0)


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
