"""Tile choice is arithmetic: it is checked for every target over the models' shapes, with no GPU and no Triton."""

from dataclasses import replace

import pytest
import torch

from apexk.kernels.triton.tune import (
    FAMILY,
    SHARED_KIB,
    choose_tile,
    choose_tiles,
    programs,
    rows_of_tile,
    shared_bytes,
)

# experts, topk, H, I of the paper's models, gpt-oss-20b (2880 is divisible by 64 but by no larger power), a tiny one
SHAPES = [(256, 8, 2048, 512), (512, 10, 2048, 512), (128, 8, 4096, 1408), (32, 4, 2880, 2880), (8, 2, 64, 48)]


@pytest.mark.parametrize("target", sorted(FAMILY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_choice_can_launch(target, dtype):
    for experts, topk, hidden, inter in SHAPES:
        for tokens in (1, 4, 32, 512, 4096):
            tiles = choose_tiles(tokens * topk, experts, hidden, inter, dtype, target)
            assert tiles.gated.block_m == tiles.down.block_m == tiles.block_m
            for op, tile, k in (("gated", tiles.gated, hidden), ("down", tiles.down, inter)):
                assert shared_bytes(op, tile, dtype) <= SHARED_KIB[target] * 1024
                assert min(tile.block_m, tile.block_n, tile.block_k) >= 16, "tl.dot takes no less"
                assert k % tile.block_k == 0, "these sizes need no mask along K"
                assert not tile.swap_ab or tile.block_n * (2 if tile.num_warps == 8 else 1) >= 64


def test_block_m_covers_twice_the_expected_load():
    assert [rows_of_tile(rows, 256, 128) for rows in (1, 8, 2048, 2049, 4096, 32768)] == [16, 16, 16, 32, 32, 128]
    assert rows_of_tile(32768, 256, 64) == 64


def test_persistent_when_work_exceeds_two_pieces_for_each_program():
    tile, device = choose_tile("down", 4096 * 8, 256, 2048, 512, torch.bfloat16, 86), torch.device("meta")  # counts as 4 SMs
    assert tile.persistent == 1 and [programs(work, tile, device) for work in (1, 8, 9, 1000)] == [1, 8, 4, 4]
    assert programs(1000, replace(tile, persistent=2), device) == 8
    assert programs(1000, replace(tile, persistent=0), device) == 1000
    assert choose_tile("down", 4 * 8, 256, 2048, 512, torch.bfloat16, 86).persistent == 0, "decode"


def test_odd_sizes_keep_a_mask_or_shrink():
    assert choose_tile("down", 8, 8, 64, 1408, torch.bfloat16, 86).block_k == 128
    assert choose_tile("down", 8, 8, 64, 48, torch.bfloat16, 86).block_k == 16
    assert choose_tile("down", 8, 8, 20, 36, torch.bfloat16, 86) == choose_tile("down", 8, 8, 32, 64, torch.bfloat16, 86)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="compute capability 70 is not known; known: 80, 86"):
        choose_tile("down", 8, 8, 64, 64, torch.bfloat16, 70)
    with pytest.raises(ValueError, match="op: got 'up', wanted gated or down"):
        choose_tile("up", 8, 8, 64, 64, torch.bfloat16, 86)
