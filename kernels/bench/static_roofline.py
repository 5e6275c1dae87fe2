"""Bytes and operations that the kernels issue for a routing, counted from the launch configuration, over the fewest possible.

Nothing is measured: it shows what a tile choice wastes before a GPU sees it. Weights are counted each time a tile asks
for them; those that another tile of the same expert asked for before come from the L2 cache at best.

    weights   an expert of n rows is read ceil(n / BLOCK_M) times, of the once that it takes
    flops     tiles are whole: ceil(n / BLOCK_M) * BLOCK_M rows, columns and K rounded up to blocks
"""

import argparse
from dataclasses import dataclass

import torch

from apexk.kernels.triton.shapes import MODELS, MoeShape
from apexk.kernels.triton.tune import LayerTiles, choose_tiles

from .inputs import drawn_ids

MODELS_SHOWN = ("qwen3.5-35b-a3b", "qwen3-next-80b", "glm-4.5-air")
TOKENS = (1, 2, 4, 8, 16, 32, 512, 1024, 2048, 4096)


@dataclass
class Work:
    """Of one kernel; rows are activations in and out."""

    weight_bytes: int
    row_bytes: int
    flops: int


def issued(loads: list[int], shape: MoeShape, tiles: LayerTiles, itemsize: int) -> dict[str, Work]:
    """What the two GEMMs and combine do for experts of these loads, all resident."""
    gated = _gemm(loads, tiles.gated, shape.inter, shape.hidden, 2, itemsize, itemsize)
    down = _gemm(loads, tiles.down, shape.hidden, shape.inter, 1, itemsize, 4)
    pairs = sum(loads)
    combine = Work(0, pairs * shape.hidden * 4 + pairs // shape.topk * shape.hidden * itemsize, pairs * shape.hidden)
    return {"gated": gated, "down": down, "combine": combine}


def fewest(loads: list[int], shape: MoeShape, itemsize: int) -> dict[str, Work]:
    """Each chosen expert once, each row in and out once, no padding."""
    pairs, chosen = sum(loads), sum(n > 0 for n in loads)
    half = shape.hidden * shape.inter
    out = pairs * shape.hidden * 4
    return {
        "gated": Work(chosen * 2 * half * itemsize, pairs * (shape.hidden + shape.inter) * itemsize, 4 * pairs * half),
        "down": Work(chosen * half * itemsize, pairs * shape.inter * itemsize + out, 2 * pairs * half),
        "combine": Work(0, out + pairs // shape.topk * shape.hidden * itemsize, pairs * shape.hidden),
    }


def _gemm(loads, tile, n, k, matrices, itemsize, out_itemsize) -> Work:
    row_tiles = sum(-(-load // tile.block_m) for load in loads)
    column_tiles = -(-n // tile.block_n)
    padded = tile.block_m * column_tiles * tile.block_n * -(-k // tile.block_k) * tile.block_k
    rows = sum(loads)
    return Work(
        row_tiles * matrices * n * k * itemsize,  # rows past N are masked out, they are not fetched
        rows * k * itemsize * column_tiles + rows * n * out_itemsize,
        2 * row_tiles * matrices * padded,
    )


def loads_of(shape: MoeShape, tokens: int) -> list[int]:
    """Loads under the skewed routing that the benchmarks draw."""
    return torch.bincount(drawn_ids(shape, tokens)[0].flatten(), minlength=shape.experts).tolist()


def rows(target: int, dtype=torch.bfloat16):
    """(model, tokens, kernel, issued, fewest) for every model and token count."""
    for model in MODELS_SHOWN:
        shape = MODELS[model]
        for tokens in TOKENS:
            loads = loads_of(shape, tokens)
            tiles = choose_tiles(sum(loads), shape.experts, shape.hidden, shape.inter, dtype, target)
            ours, least = issued(loads, shape, tiles, dtype.itemsize), fewest(loads, shape, dtype.itemsize)
            for kernel, work in ours.items():
                yield model, tokens, kernel, work, least[kernel]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="apexk kernels triton --roofline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=int, default=86, help="compute capability, 86 for 8.6 (default)")
    args = parser.parse_args(argv)
    print(f"{'model':18} {'T':>5} {'kernel':8} {'weights MB':>11} {'x least':>8} {'rows MB':>9} {'GFLOP':>9} {'x least':>8}")
    for model, tokens, kernel, work, least in rows(args.target):
        again = f"{work.weight_bytes / least.weight_bytes:8.3f}" if least.weight_bytes else f"{'-':>8}"
        print(
            f"{model:18} {tokens:5} {kernel:8} {work.weight_bytes / 1e6:11.1f} {again} {work.row_bytes / 1e6:9.2f} "
            f"{work.flops / 1e9:9.3f} {work.flops / least.flops:8.2f}"
        )
    return 0
