"""The kernels' own source, run by threads of the CPU, against the references; and the wrappers' refusals."""

import threading

import pytest
import torch

from apexk.kernels.cuda.reference import slot_gather_ref, slot_ready_ref
from apexk.kernels.cuda.slots import CHUNK_BYTES, slot_gather, slot_ready

EPOCH = 7


class Layer:
    """E host blocks, S slots of NaN-like 0xAB bytes, and a list; everything that must not move is compared afterwards."""

    def __init__(self, experts, slots, payload, host=12, room=9, count=None):
        stride = -(-payload // 4096) * 4096
        self.host = torch.randint(0, 255, (host, stride), dtype=torch.uint8)
        assert self.host.data_ptr() % 16 == 0, "torch's CPU allocator aligns to 64 bytes"
        self.blocks = self.host.data_ptr() + torch.arange(host, dtype=torch.int64) * stride
        self.experts, self.slots = (torch.tensor(v, dtype=torch.int32) for v in (experts, slots))
        self.count = torch.tensor([len(experts) if count is None else count], dtype=torch.int32)
        self.epoch = torch.tensor([EPOCH], dtype=torch.int32)
        self.pool = torch.full((room, stride), 0xAB, dtype=torch.uint8)
        self.ready = torch.full((room,), EPOCH - 1, dtype=torch.int32)
        self.landed = torch.zeros(len(experts), dtype=torch.int32)
        self.payload = payload

    def given(self):
        return self.blocks, self.experts, self.slots, self.count, self.epoch

    def want(self):
        pool, ready = self.pool.clone(), self.ready.clone()
        slot_gather_ref(*self.given(), pool, ready, -(-self.payload // 16) * 16)  # whole words move
        return pool, ready


CASES = {
    "one expert, less than a word": dict(experts=[3], slots=[0], payload=10),
    "last word is cut": dict(experts=[5, 1], slots=[8, 2], payload=CHUNK_BYTES + 1000),
    "whole chunks": dict(experts=[0, 11, 4], slots=[1, 0, 7], payload=2 * CHUNK_BYTES),
    "an expert into two slots": dict(experts=[2, 2], slots=[3, 5], payload=5000),
    "fewer than listed": dict(experts=[1, 2, 3], slots=[1, 2, 3], payload=5000, count=2),
    "none": dict(experts=[1, 2], slots=[1, 2], payload=5000, count=0),
    "entries to leave out": dict(experts=[1, -1, 3], slots=[-1, 2, 4], payload=5000),
}


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slot_gather_is_its_reference(kernels, case, grid):
    layer = Layer(**case)
    pool, ready = layer.want()
    for _ in range(2):  # the counters are as they were, so it can be launched again
        slot_gather(kernels["slot_gather"], *layer.given(), layer.pool, layer.ready, layer.landed, layer.payload, grid=grid)
        assert torch.equal(layer.pool, pool) and torch.equal(layer.ready, ready) and not layer.landed.any()


def test_a_raised_flag_means_that_the_bytes_are_there(kernels):
    layer = Layer(list(range(9)), list(range(9)), payload=4 * CHUNK_BYTES)
    pool, _ = layer.want()
    wrong, seen = [], set()

    def look():
        while len(seen) < 9:
            for slot in (layer.ready == EPOCH).nonzero().flatten().tolist():
                if slot not in seen and not torch.equal(layer.pool[slot], pool[slot]):
                    wrong.append(slot)
                seen.add(slot)

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    slot_gather(kernels["slot_gather"], *layer.given(), layer.pool, layer.ready, layer.landed, layer.payload, grid=2)
    reader.join(30)
    assert not reader.is_alive() and not wrong


def test_slot_ready_is_its_reference(kernels):
    slots = torch.tensor([4, -1, 0, 6, 2], dtype=torch.int32)
    for count in (0, 3, 5):
        ready = torch.full((8,), EPOCH - 1, dtype=torch.int32)
        want, number, epoch = ready.clone(), torch.tensor([count], dtype=torch.int32), torch.tensor([EPOCH], dtype=torch.int32)
        slot_ready_ref(slots, number, epoch, want)
        slot_ready(kernels["slot_ready"], slots, number, epoch, ready)
        assert torch.equal(ready, want)


def refuse(*_):
    raise AssertionError("launched")


@pytest.mark.parametrize(("change", "says"), [
    (dict(count=torch.zeros(2, dtype=torch.int32)), r"count: got shape \[2\], wanted \[1\]"),
    (dict(experts=torch.zeros(2, dtype=torch.int64)), "experts: got torch.int64, wanted torch.int32"),
    (dict(ready=torch.zeros(4, dtype=torch.int32)), r"ready: got shape \[4\], wanted \[9\]"),
    (dict(pool=torch.zeros(9, 4100, dtype=torch.uint8)), "slots of 4100 bytes"),
    (dict(payload=5000), r"payload_bytes is 5000, wanted 1..4096"),
    (dict(payload=0), r"payload_bytes is 0"),
])  # fmt: skip
def test_refusals(change, says):
    layer = Layer([1, 2], [1, 2], payload=4000)
    vars(layer).update(change)
    with pytest.raises((ValueError, TypeError), match=says):
        slot_gather(refuse, *layer.given(), layer.pool, layer.ready, layer.landed, layer.payload)


def test_an_empty_list_launches_nothing():
    layer = Layer([], [], payload=4000)
    slot_gather(refuse, *layer.given(), layer.pool, layer.ready, layer.landed, layer.payload)
