"""An expert's pairs divided between two computers: the kernels run one share, take the rows of the other, and touch no third."""

import pytest
import torch

from apexk.device.base import divided_ids
from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import moe_ffn_ref
from apexk.kernels.triton.take_rows import take_rows
from apexk.kernels.triton.tune import LayerTiles, Tile

TILES = LayerTiles(Tile(16, 64, 32, 4, 2), Tile(16, 32, 64, 4, 2))
EXPERTS = 6


@pytest.mark.parametrize("tokens", [1, 3, 8, 33])
def test_two_shares_make_the_whole(tokens, make_layer, close, guard):
    layer = make_layer(T=tokens, experts=EXPERTS, slots=4, resident=4)
    slot_of = layer.slot_of.cpu()
    ids = layer.ids.cpu().long()
    loads = torch.bincount(ids.flatten(), minlength=EXPERTS)
    split = {e: int(loads[e]) // 2 for e in range(EXPERTS) if slot_of[e] >= 0}  # 0 of a load of one, as a part may have
    want = layer.fresh_out().double()
    moe_ffn_ref(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, want)
    if tokens > 1:
        assert any(split.values())

    gpu, _ = divided_ids(layer.ids, split, -1)
    _, cpu = divided_ids(ids, split, EXPERTS)
    (_, hidden), inter = layer.x.shape, layer.w2.shape[2]
    workspace = Workspace(tokens, layer.topk, EXPERTS, hidden, inter, layer.x.dtype, layer.x.device, TILES)
    workspace.begin(layer.ids)  # at the routing event
    gpu, pairs = guard(gpu.cpu()), layer.fresh_out()
    moe_ffn(layer.x, layer.w13, layer.w2, gpu, layer.weights, layer.slot_of, pairs, step=workspace.begin(gpu))
    mine = torch.zeros(ids.numel(), dtype=torch.bool)
    for expert, count in split.items():
        mine[(ids.flatten() == expert).nonzero().flatten()[:count]] = True
    assert torch.equal(~pairs.cpu().isnan().any(1), mine), "the GPU's rows and no other"

    host = want.float().cpu()
    host[mine] = float("nan")  # the CPU's rows: those of the others only
    mark = torch.full((EXPERTS + 1,), -1, dtype=torch.int32)
    mark[list(split)] = 0
    take_rows(guard(host), guard(cpu), guard(mark), pairs)
    close(pairs, want, torch.float32)
