"""Pinning of the host store: what is registered, that nothing stays so, and a failure that leaves a store that works."""

import logging

import pytest
import torch

from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore

BLOCK = ExpertBlock(40, 24, torch.float32)  # 11,520 bytes in a stride of 12,288


class Registry:
    """Keeps what is registered; the call with number `fails` raises."""

    def __init__(self, fails=None, error=RuntimeError):
        self.held, self.calls, self.fails, self.error = {}, 0, fails, error

    def register(self, address, nbytes):
        self.calls += 1
        if self.calls - 1 == self.fails:
            raise self.error("cudaHostRegister failed with CUDA error 2: out of memory")
        assert all(address + nbytes <= a or a + n <= address for a, n in self.held.items()), "registered twice"
        self.held[address] = nbytes

    def unregister(self, address):
        del self.held[address]


@pytest.fixture
def store():
    made = HostStore(3, 5, BLOCK)
    for layer in range(3):
        made.put(layer, torch.randn(5, 48, 40), torch.randn(5, 40, 24))
    return made


@pytest.mark.parametrize(("chunk", "pieces"), [(1 << 30, [5]), (30_000, [2, 2, 1]), (1, [1] * 5)], ids=["whole", "two_blocks", "one_block"])
def test_every_block_lies_in_one_registration(store, chunk, pieces):
    registry = Registry()
    result = store.pin(registry, chunk)
    assert result.bytes == sum(registry.held.values()) == store.nbytes == 3 * 5 * BLOCK.stride_bytes and result.failure is None
    assert [n // BLOCK.stride_bytes for n in registry.held.values()] == pieces * 3
    for layer in range(3):
        for address in store.addresses(layer).tolist():
            assert sum(a <= address and address + BLOCK.stride_bytes <= a + n for a, n in registry.held.items()) == 1
    store.drop(1)  # its memory must not go while it is registered
    assert sum(registry.held.values()) == 2 * 5 * BLOCK.stride_bytes
    store.unpin()
    store.unpin()
    assert not registry.held


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("fails", [0, 4])
def test_a_failure_is_loud_and_leaves_an_unpinned_store_that_works(store, fails, error, caplog):
    before = [store.blocks(layer).clone() for layer in range(3)]
    registry = Registry(fails, error)
    with caplog.at_level(logging.WARNING, "apexk.store"):
        result = store.pin(registry, 2 * BLOCK.stride_bytes)
    assert result.bytes == 0 and store.pinning is result and not registry.held
    (record,) = caplog.records
    done = (0, 2 + 2 + 1 + 2)[fails == 4] * BLOCK.stride_bytes  # blocks of the calls before
    for word in ("not pinned", f"after {done / 2**30:.2f} of", "out of memory", "ulimit -l", "GiB of host memory are available"):
        assert word in result.failure and word in record.getMessage()
    assert all(torch.equal(store.blocks(layer), before[layer]) for layer in range(3))
    store.put(0, torch.ones(5, 48, 40), torch.ones(5, 40, 24))
    assert store.w13(0).sum() == 5 * 48 * 40


def test_an_interrupt_leaves_nothing_registered(store):
    registry = Registry(2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        store.pin(registry)
    assert not registry.held


def test_dropped_layers_are_not_pinned(store):
    registry = Registry()
    store.drop(0)
    assert store.pin(registry).bytes == 2 * 5 * BLOCK.stride_bytes
