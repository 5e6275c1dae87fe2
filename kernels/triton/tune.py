"""Which tile a GEMM uses: a pure function of sizes, dtype and compute capability, so that it is tested without a GPU.

The number of rows of each expert is on the device and stays there; the choice goes by the expected number. A kernel
computes every row on its own, but tiles of different shape add in a different order: all phases of a layer must
therefore ask with the same arguments, and then any split into phases gives the same bits.
"""

import functools
from dataclasses import dataclass

import torch

# Shared memory a block may use, KiB (CUDA programming guide, table of compute capabilities).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
ROWS = (16, 32, 64, 128)  # tl.dot wants 16 at least; beyond 128 an expert's weights are read from the L2 cache anyway


@dataclass(frozen=True)
class Tile:
    """Launch configuration of one GEMM.

    With `swap_ab` the weights are the tensor core's M side, the tokens its N side. With `persistent` a launch has no
    more programs than run at once, when each would otherwise be started and ended more than twice over.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    swap_ab: bool = False
    persistent: int = 0  # programs an SM; 0: one program for each piece of work


@dataclass(frozen=True)
class LayerTiles:
    """The two GEMMs of a layer share one tile list, hence block_m."""

    gated: Tile
    down: Tile

    @property
    def block_m(self) -> int:
        return self.gated.block_m


# By family, GEMM and block_m: block_n, block_k, num_warps, num_stages, programs an SM where persistent. What stands here
# compiles without spills, by the ahead-of-time gate; which is fastest is for a GPU to say.
# - 16 rows stream weights: small tiles, so that many blocks have many bytes requested. 64 rows and more compute.
# - Gate and up share a block, so the gated GEMM holds two accumulators and takes half the columns of the down GEMM.
# - Persistent from 64 rows up, except where the outer loop's registers halve the blocks of an SM or spill.
# - 128 rows: a tile's bytes from L2 shrink with its sides, and at long prefills those bytes are what is scarce on rtx.
# - rtx: 99 KiB of shared memory a block. hopper: 64 rows at least on the M side make wgmma (tcgen05 on the next).
HALF = {
    "a100": {
        "gated": {16: (32, 64, 4, 4), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3, 2), 128: (64, 64, 8, 3, 1)},
        "down": {16: (32, 128, 4, 4), 32: (64, 64, 4, 4), 64: (128, 64, 8, 3, 2), 128: (128, 32, 8, 4, 1)},
    },
    "rtx": {
        "gated": {16: (32, 64, 4, 4), 32: (64, 64, 4, 3), 64: (64, 64, 4, 3, 2), 128: (64, 32, 8, 4, 2)},
        "down": {16: (32, 128, 4, 4), 32: (64, 64, 4, 4), 64: (128, 64, 8, 3), 128: (128, 32, 8, 4, 1)},
    },
    "hopper": {
        "gated": {16: (32, 64, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 4, 4, 2), 128: (128, 64, 8, 3, 1)},
        "down": {16: (32, 128, 4, 4), 32: (64, 64, 4, 4), 64: (128, 64, 4, 3, 3), 128: (128, 64, 8, 3)},
    },
}
# Weights on the M side (hopper only): 64 of their rows make wgmma even where an expert has few tokens. Half as many blocks
# as the plain tiles of 16 rows, so only where enough remain.
SWAPPED = {"gated": {16: (64, 64, 4, 4), 32: (64, 64, 4, 4)}, "down": {16: (64, 128, 4, 4), 32: (64, 64, 4, 4)}}
ENOUGH_BLOCKS = 264  # two for each SM of an H200
# IEEE float32 has no tensor core: small tiles of plain multiply-adds.
SINGLE = {"gated": {16: (16, 32, 4, 3), 32: (32, 32, 4, 3)}, "down": {16: (32, 32, 4, 3), 32: (32, 32, 4, 3)}}
FAMILY = {80: "a100", 86: "rtx", 89: "rtx", 120: "rtx", 90: "hopper", 100: "hopper", 103: "hopper"}
INTERPRETER = 80  # CPU tensors in the interpreter take the choices of this target


@functools.lru_cache(maxsize=4096)
def choose_tiles(pairs, experts, hidden, inter, dtype, target) -> LayerTiles:
    """Tiles of a layer's gated [pairs, hidden] x [2*inter, hidden] and down [pairs, inter] x [hidden, inter] GEMMs."""
    gated = choose_tile("gated", pairs, experts, inter, hidden, dtype, target)
    down = choose_tile("down", pairs, experts, hidden, inter, dtype, target)
    return LayerTiles(gated, down)


def choose_tile(op, rows, groups, n, k, dtype, target) -> Tile:
    """Tile of `op` ("gated" or "down") for `rows` rows in `groups` groups, N = n columns, K = k."""
    if target not in FAMILY:
        raise ValueError(f"compute capability {target} is not known; known: {', '.join(map(str, sorted(FAMILY)))}")
    if op not in SINGLE:
        raise ValueError(f"op: got {op!r}, wanted gated or down")
    family = FAMILY[target]
    table = (SINGLE if dtype == torch.float32 else HALF[family])[op]
    block_m = rows_of_tile(rows, groups, max(table))
    swap = dtype != torch.float32 and family == "hopper" and _swap_pays(SWAPPED[op].get(block_m), rows, groups, n)
    block_n, block_k, warps, stages, *persistent = (SWAPPED[op] if swap else table)[block_m]
    return Tile(
        block_m, block_n if swap else min(block_n, _power_above(n)), _dividing(k, block_k), warps, stages,
        group_m=8 if block_m >= 64 else 1, swap_ab=swap, persistent=persistent[0] if persistent else 0,
    )  # fmt: skip


def _swap_pays(values, rows, groups, n) -> bool:
    return values is not None and min(rows, groups) * -(-n // values[0]) >= ENOUGH_BLOCKS


def rows_of_tile(rows, groups, most) -> int:
    """Twice the expected load, so that few experts need a second tile (and their weights a second read)."""
    expected = -(-2 * rows // max(groups, 1))
    return next((m for m in ROWS if m >= min(expected, most)), most)


def programs(work, tile, device) -> int:
    """Size of the grid for so many pieces of work."""
    at_once = tile.persistent * processors(device)
    return at_once if at_once and work > 2 * at_once else work


def processors(device) -> int:
    """Streaming multiprocessors; few where there is no GPU, so that the interpreter sees programs with several pieces."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def target_of(device) -> int:
    """Compute capability as an integer, 86 for 8.6; the interpreter's stand-in where there is no GPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    exact = major * 10 + minor
    return exact if exact in FAMILY else max((t for t in FAMILY if t <= exact), default=exact)


def shared_bytes(op, tile, dtype) -> int:
    """Shared memory that the pipeline's buffers take: x rows and weight rows of BLOCK_K, (stages - 1) times."""
    weight_rows = tile.block_n * (2 if op == "gated" else 1)
    return (tile.block_m + weight_rows) * tile.block_k * dtype.itemsize * max(tile.num_stages - 1, 1)


def _power_above(n) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _dividing(k, block_k) -> int:
    """The largest block from block_k down to 16 that divides k, so that no load needs a mask along K; else block_k."""
    block_k = min(block_k, _power_above(k))
    fit = block_k
    while fit > 16 and k % fit:
        fit //= 2
    return fit if k % fit == 0 else block_k
