"""The expert block and the host store: where every weight lies, byte by byte."""

import pytest
import torch

from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool

SHAPES = [(8, 8), (40, 24), (128, 64), (100, 12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_block_is_gate_up_down_in_one_run(hidden, intermediate, dtype):
    store = HostStore(2, 3, ExpertBlock(hidden, intermediate, dtype))
    w13 = torch.randn(3, 2 * intermediate, hidden).to(dtype)
    w2 = torch.randn(3, hidden, intermediate).to(dtype)
    store.put(1, w13, w2)
    assert torch.equal(store.w13(1), w13) and torch.equal(store.w2(1), w2)
    blocks = store.blocks(1)
    for e in range(3):
        run = blocks[e, : 3 * hidden * intermediate]
        assert torch.equal(run, torch.cat([w13[e].reshape(-1), w2[e].reshape(-1)]))
    assert not store.blocks(0).any(), "the other layer is untouched"


@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_biases_follow_the_matrices(hidden, intermediate):
    block = ExpertBlock(hidden, intermediate, torch.float32, biases=True)
    store, pool = HostStore(1, 3, block), Pool(2, block)
    parts = [torch.randn(3, *shape) for shape in ((2 * intermediate, hidden), (hidden, intermediate), (2 * intermediate,), (hidden,))]
    store.put(0, *parts)
    assert block.payload_bytes == 4 * (3 * hidden * intermediate + 2 * intermediate + hidden)
    for e in range(3):
        run = store.blocks(0)[e, : block.elements]
        assert torch.equal(run, torch.cat([part[e].reshape(-1) for part in parts]))
    pool.memory[1].copy_(store.blocks(0)[2])
    for view, stored, part in zip((pool.w13, pool.w2, pool.b13, pool.b2), (store.w13, store.w2, store.b13, store.b2), parts, strict=True):
        assert torch.equal(view[1], part[2]) and torch.equal(stored(0), part)
    assert len({view(0).untyped_storage().data_ptr() for view in (store.w13, store.w2, store.b13, store.b2)}) == 4
    plain = HostStore(1, 2, ExpertBlock(hidden, intermediate, torch.float32))
    assert plain.b13(0) is None and plain.b2(0) is None


@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_addresses_are_aligned_and_point_at_the_blocks(hidden, intermediate):
    store = HostStore(2, 5, ExpertBlock(hidden, intermediate, torch.bfloat16))
    for layer in range(2):
        addresses = store.addresses(layer)
        assert (addresses % 4096 == 0).all()
        assert [int(a) for a in addresses] == [store.blocks(layer)[e].data_ptr() for e in range(5)]


def test_views_have_storages_of_their_own():
    """Code that finds shared weights by the address of a storage must not take two parameters for one."""
    store = HostStore(2, 2, ExpertBlock(8, 8, torch.float32))
    starts = {view(layer).untyped_storage().data_ptr() for layer in range(2) for view in (store.w13, store.w2)}
    assert len(starts) == 4


def test_views_outlive_the_store():
    store = HostStore(1, 2, ExpertBlock(8, 8, torch.float32))
    store.put(0, torch.ones(2, 16, 8), torch.ones(2, 8, 8))
    view = store.w2(0)
    del store
    assert view.sum() == 128


def test_pool_starts_as_nan_and_takes_no_slots():
    block = ExpertBlock(8, 8, torch.bfloat16)
    assert Pool(6, block).memory.isnan().all()
    empty = Pool(0, block)
    assert empty.nbytes == 0 and empty.w13.shape == (0, 16, 8) and empty.w2.shape == (0, 8, 8)


@pytest.mark.parametrize(("hidden", "intermediate"), [(0, 8), (8, -1)])
def test_bad_sizes(hidden, intermediate):
    with pytest.raises(ValueError, match="positive"):
        ExpertBlock(hidden, intermediate, torch.float32)


def test_bad_dtype_and_layer():
    with pytest.raises(TypeError, match="int8"):
        ExpertBlock(8, 8, torch.int8)
    with pytest.raises(IndexError, match="layer 3"):
        HostStore(2, 2, ExpertBlock(8, 8, torch.float32)).blocks(3)
