"""What a layer costs the host per step: launches, and no allocation; and addresses past 2**31 elements."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import moe_ffn_ref
from apexk.kernels.triton.tune import LayerTiles, Tile

TILES = LayerTiles(Tile(16, 64, 32, 4, 2), Tile(16, 32, 64, 4, 2))
FAR = 2**30 + 64


class Calls(TorchDispatchMode):
    """Names of the torch operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that would be started; none runs, so that only the wrappers' own work is seen."""
    import triton

    if triton.knobs.runtime.interpret:
        from triton.runtime.interpreter import InterpretedFunction as Kernel
    else:
        from triton.runtime.jit import JITFunction as Kernel
    started = []
    monkeypatch.setattr(Kernel, "run", lambda self, *args, **kwargs: started.append(self.__name__))
    return started


def step(layer, workspace, pairs, out, phases):
    """What the engine does for a layer's GPU half: route once, each phase, combine."""
    begun = workspace.begin(layer.ids)
    for slot_of in phases:
        moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, slot_of, pairs, step=begun)
    combine(pairs, layer.topk, out, topk_ids=layer.ids, slot_of=layer.slot_of)


@pytest.mark.parametrize("waves", [0, 1, 2])
def test_launches_and_allocations(waves, make_layer, launches):
    """Four launches when nothing arrives, two more for each wave; views only, no memory."""
    layer = make_layer(T=3, topk=2)
    (tokens, hidden), inter = layer.x.shape, layer.w2.shape[2]
    workspace = Workspace(tokens + 5, 2, 10, hidden, inter, layer.x.dtype, layer.x.device)
    pairs, out = layer.fresh_out(), torch.empty_like(layer.x)
    phases = [layer.slot_of.clone() for _ in range(1 + waves)]
    with Calls() as calls:
        step(layer, workspace, pairs, out, phases)
    assert len(launches) == 4 + 2 * waves, launches
    views = ("aten.slice", "aten.split", "aten.view", "aten.alias", "aten.select")
    assert all(name.startswith(views) for name in calls.names), f"more than views: {calls.names}"


@pytest.mark.parametrize("part", ["slots", "rows"])
def test_addresses_past_int32(part, device):
    """Index 3 times a stride of 2**30 is no int32 any more. Memory that is never touched costs nothing."""
    H, I = 32, 16
    generator = torch.Generator().manual_seed(3)
    stride = FAR if part == "slots" else 3 * H * I
    pool = torch.empty(3 * stride + 3 * H * I, dtype=torch.float16, device=device)  # four slots
    w13, w2 = pool.as_strided((4, 2 * I, H), (stride, H, 1)), pool.as_strided((4, H, I), (stride, I, 1), 2 * H * I)
    w13[3] = (torch.randn(2 * I, H, generator=generator) / H**0.5).half()
    w2[3] = (torch.randn(H, I, generator=generator) / I**0.5).half()
    distance = FAR if part == "rows" else H
    x = torch.empty(3 * distance + H, dtype=torch.float16, device=device).as_strided((4, H), (distance, 1))
    x.copy_(torch.randn(4, H, generator=generator))
    ids = torch.ones(4, 1, dtype=torch.int64, device=device)
    weights, slot_of = torch.ones(4, 1, device=device), torch.tensor([-1, 3], dtype=torch.int32, device=device)
    got, want = torch.empty(4, H, device=device), torch.empty(4, H, dtype=torch.float64, device=device)
    step = Workspace(4, 1, 2, H, I, torch.float16, device, TILES).begin(ids)
    moe_ffn(x, w13, w2, ids, weights, slot_of, got, step=step)
    moe_ffn_ref(x, w13, w2, ids, weights, slot_of, want)
    assert (got.double() - want).abs().max() < 2e-3
