"""The two GEMMs alone, on rows that are in slot order already."""

import pytest
import torch

from apexk.kernels.triton.grouped_gemm import gated_gemm, grouped_gemm
from apexk.kernels.triton.reference import ACTIVATIONS, gated_gemm_ref, grouped_gemm_ref
from apexk.kernels.triton.tune import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOADS = {
    "drawn": [3, 1, 5],
    "empty_first_middle_last": [0, 4, 0, 2, 0],
    "all_to_one": [0, 17, 0],
    "one_row": [0, 0, 1],
    "no_row": [0, 0],
    "tile_edges": [15, 16, 17, 33],
}
TILE = Tile(16, 32, 32, 4, 2)


def inputs(loads, K, N, dtype, guard, rng):
    """Rows, weights with a gap between slots, offsets. Slots without rows are NaN, and so is the gap."""
    offsets = torch.cat([torch.zeros(1), torch.cumsum(torch.tensor(loads), 0)]).int()
    flat = torch.full((len(loads), N * K + 32), float("nan"))
    for slot, load in enumerate(loads):
        if load:
            flat[slot, : N * K] = torch.randn(N * K, generator=rng) / K**0.5
    flat = guard(flat.to(dtype))
    w = flat.as_strided((len(loads), N, K), (N * K + 32, K, 1), flat.storage_offset())
    return guard(torch.randn(sum(loads), K, generator=rng).to(dtype)), w, guard(offsets)


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("op", ["gated", "grouped"])
def test_fp32_equals_reference(op, loads, guard, rng, close):
    run, ref = (gated_gemm, gated_gemm_ref) if op == "gated" else (grouped_gemm, grouped_gemm_ref)
    x, w, offsets = inputs(LOADS[loads], 72, 80, torch.float32, guard, rng)
    out = guard(torch.full((x.shape[0], 40 if op == "gated" else 80), float("nan")))
    assert run(x, w, offsets, out=out, tile=TILE) is out
    close(out, ref(x.double(), w.double(), offsets), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["gated", "grouped"])
def test_own_tiles(op, dtype, guard, rng, close):
    """No tile given: what tune.py says for these sizes."""
    run, ref = (gated_gemm, gated_gemm_ref) if op == "gated" else (grouped_gemm, grouped_gemm_ref)
    x, w, offsets = inputs(LOADS["drawn"], 96, 64, dtype, guard, rng)
    close(run(x, w, offsets), ref(x, w, offsets), dtype)


@pytest.mark.parametrize("tile", [
    pytest.param(Tile(16, 16, 16, 4, 2), marks=pytest.mark.slow), Tile(32, 32, 64, 4, 2), Tile(64, 128, 128, 4, 2),
    Tile(16, 64, 32, 4, 2, swap_ab=True), Tile(16, 64, 64, 4, 2, group_m=2),
    pytest.param(Tile(16, 32, 32, 4, 2, group_m=8), marks=pytest.mark.slow),
], ids=["smallest", "wider", "past_every_size", "swapped", "pairs_of_tiles", "all_tiles_in_a_group"])  # fmt: skip
def test_tile_shapes(tile, guard, rng, close):
    x, w, offsets = inputs(LOADS["tile_edges"], 48, 96, torch.float16, guard, rng)
    close(gated_gemm(x, w, offsets, tile=tile), gated_gemm_ref(x, w, offsets), torch.float16)
    close(grouped_gemm(x, w, offsets, tile=tile), grouped_gemm_ref(x, w, offsets), torch.float16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_bias(activation, guard, rng, close):
    x, w, offsets = inputs(LOADS["drawn"], 32, 64, torch.float32, guard, rng)
    x *= 8
    bias = guard(torch.randn(3, 64, generator=rng))
    got = gated_gemm(x, w, offsets, activation, bias=bias, tile=TILE)
    close(got, gated_gemm_ref(x.double(), w.double(), offsets, activation, bias=bias), torch.float32)
    got = grouped_gemm(x, w, offsets, bias=bias, tile=TILE)
    close(got, grouped_gemm_ref(x.double(), w.double(), offsets, bias=bias), torch.float32)


def test_inputs_that_cannot_be_multiplied_are_refused(guard, rng):
    x, w, offsets = inputs([2, 1], 32, 48, torch.float32, guard, rng)
    with pytest.raises(ValueError, match=r"w: got shape \[2, 48, 32\], wanted \[S, N, 16\]"):
        grouped_gemm(x[:, :16], w, offsets)
    with pytest.raises(ValueError, match=r"offsets: got shape \[2\], wanted \[3\]"):
        grouped_gemm(x, w, offsets[:2])
    with pytest.raises(ValueError, match="w13: has 47 rows an expert, wanted an even number"):
        gated_gemm(x, w[:, :47], offsets)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        gated_gemm(x, w, offsets, "relu")
    with pytest.raises(TypeError, match="bias: got torch.float16, wanted torch.float32"):
        grouped_gemm(x, w, offsets, bias=torch.ones(2, 48, dtype=torch.float16, device=x.device))
