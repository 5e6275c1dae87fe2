"""What the chosen tiles issue, by count: at decode every chosen expert's weights are asked for once."""

import pytest
import torch

from apexk.kernels.bench.static_roofline import TOKENS, Work, fewest, issued, loads_of, main, rows
from apexk.kernels.triton.shapes import MODELS, MoeShape
from apexk.kernels.triton.tune import FAMILY, LayerTiles, Tile

SHAPE = MoeShape(experts=4, topk=2, hidden=64, inter=32, layers=1)
TILES = LayerTiles(Tile(16, 32, 64, 4, 2), Tile(16, 32, 32, 4, 2))


def test_counts_by_hand():
    ours = issued([1, 0, 17, 0], SHAPE, TILES, 2)
    assert ours["gated"] == Work(3 * 2 * 32 * 64 * 2, 18 * 64 * 2 + 18 * 32 * 2, 2 * 3 * 2 * 16 * 32 * 64)
    assert ours["down"] == Work(3 * 64 * 32 * 2, 18 * 32 * 2 * 2 + 18 * 64 * 4, 2 * 3 * 16 * 64 * 32)
    least = fewest([1, 0, 17, 0], SHAPE, 2)
    assert least["gated"] == Work(2 * 2 * 32 * 64 * 2, 18 * 96 * 2, 4 * 18 * 64 * 32)
    assert least["down"].weight_bytes == 2 * 64 * 32 * 2 and least["down"].flops == 2 * 18 * 64 * 32


@pytest.mark.parametrize("target", sorted(FAMILY))
def test_weights_are_read_once_at_decode(target):
    """At most 1.05 of the least for any of the models up to 32 tokens, with skewed routing."""
    for model, tokens, kernel, work, least in rows(target):
        if tokens <= 32 and least.weight_bytes:
            assert work.weight_bytes <= 1.05 * least.weight_bytes, (model, tokens, kernel)
        assert work.flops >= least.flops and work.row_bytes >= least.row_bytes


def test_every_pair_has_a_load():
    for tokens in TOKENS:
        assert sum(loads_of(MODELS["qwen3-next-80b"], tokens)) == tokens * 10


def test_table(capsys):
    assert main(["--target", "90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 * len(TOKENS) * 3 and "glm-4.5-air" in lines[-1]


def test_half_and_single_precision_differ_by_their_size():
    assert torch.bfloat16.itemsize * 2 == torch.float32.itemsize
    half, single = issued([3, 4], SHAPE, TILES, 2), issued([3, 4], SHAPE, TILES, 4)
    assert single["gated"].weight_bytes == 2 * half["gated"].weight_bytes
