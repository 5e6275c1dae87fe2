"""Tiles that wait for their slot's flag: they start when the epoch is there, and give up with a mark when it never comes."""

import threading
import time

import pytest
import torch

from apexk.kernels.triton.grouped_gemm import Arrivals
from apexk.kernels.triton.moe_ffn import moe_ffn

EPOCH = 41


@pytest.fixture
def layer(make_layer):
    table = torch.tensor([2, -1, 0, -1, 3], dtype=torch.int32)
    return make_layer(ids=torch.tensor([[0, 2], [4, 1], [2, 0]]), experts=5, slots=4, slot_of=table)


def arrivals(layer, ready, **options):
    device = layer.x.device
    ready = torch.tensor(ready, dtype=torch.int32, device=device)
    return Arrivals(ready, EPOCH, torch.zeros(1, dtype=torch.int32, device=device), **options)


def run(layer, **options):
    out = layer.fresh_out()
    moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, out, **options)
    return out


def test_ready_slots_give_the_bits_of_a_launch_that_does_not_wait(layer):
    waiting = arrivals(layer, [EPOCH, 0, EPOCH, EPOCH])
    assert torch.equal(run(layer, arrivals=waiting).nan_to_num(9), run(layer).nan_to_num(9))
    assert waiting.late.item() == 0


def test_a_slot_that_never_comes_is_left_out_and_marked(layer):
    """Slot 0 holds an older epoch: expert 2 is not computed, the others are."""
    waiting = arrivals(layer, [EPOCH - 1, 0, EPOCH, EPOCH], max_polls=2)
    out = run(layer, arrivals=waiting)
    assert waiting.late.item() == 1
    missing = (layer.ids == 2).flatten()
    assert out[missing].isnan().all()
    assert torch.equal(out[~missing].nan_to_num(9), run(layer)[~missing].nan_to_num(9))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the thread stands for a copy, which the interpreter lets run meanwhile")
def test_weights_that_land_during_the_wait_are_used(layer):
    want = run(layer)
    weights = [(w, w[0].clone()) for w in (layer.w13, layer.w2)]
    for w, _ in weights:
        w[0].fill_(float("nan"))
    waiting = arrivals(layer, [EPOCH - 1, 0, EPOCH, EPOCH])

    def land():
        time.sleep(0.3)
        for w, kept in weights:
            w[0].copy_(kept)
        waiting.ready[0] = EPOCH

    copy = threading.Thread(target=land)
    copy.start()
    out = run(layer, arrivals=waiting)
    copy.join()
    assert torch.equal(out.nan_to_num(9), want.nan_to_num(9)) and waiting.late.item() == 0


def test_refusals(layer):
    waiting = arrivals(layer, [EPOCH] * 3)
    with pytest.raises(ValueError, match=r"arrivals.ready: got shape \[3\], wanted \[4\]"):
        run(layer, arrivals=waiting)
