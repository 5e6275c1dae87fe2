"""`slot_gather` and `slot_ready`: checks and launches. The kernels' own text says what they compute and how.

Neither imports cupy: `kernel(grid, block, arguments)` is a function of a loaded module that launches on the current
stream, as cupy's are; arguments are addresses and integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from apexk.kernels.triton.checks import check

Kernel = Callable[[tuple[int], tuple[int], tuple[int, ...]], None]

THREADS, UNROLL = 256, 8  # of slot_gather.cu
WORD = 16  # bytes that a thread reads at a time
CHUNK_BYTES = THREADS * UNROLL * WORD  # that a block moves at a time
GRID = 64  # blocks: 2 MiB asked of the link at any time, some ten times what 32 GB/s and 2 us need


def slot_gather(kernel: Kernel, blocks: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor, count: torch.Tensor,
                epoch: torch.Tensor, pool: torch.Tensor, ready: torch.Tensor, landed: torch.Tensor, payload_bytes: int,
                *, grid: int = GRID) -> None:
    """Moves listed experts' blocks into slots; see `slot_gather_ref`. One launch, whose size depends on no list.

    blocks int64 [E] device-visible addresses of pinned host memory, multiples of 16; experts and slots int32 [n];
    count and epoch int32 [1]; pool uint8 [S, stride_bytes]; ready int32 [S]; landed int32 [n], zero; `payload_bytes` of
    a block. Each slot may be listed once.
    """
    check("pool", pool, ("S", "bytes"), (torch.uint8,), rows_contiguous=True)
    check("blocks", blocks, ("E",), (torch.int64,), like=pool)
    check("experts", experts, ("n",), (torch.int32,), like=pool)
    for name, tensor, size in (("slots", slots, experts.numel()), ("landed", landed, experts.numel()), ("count", count, 1),
                               ("epoch", epoch, 1), ("ready", ready, pool.shape[0])):
        check(name, tensor, (size,), (torch.int32,), like=pool)
    stride = pool.stride(0)
    if stride % WORD or pool.data_ptr() % WORD:
        raise ValueError(f"pool: slots of {stride} bytes from {pool.data_ptr():#x}, wanted both to be multiples of {WORD}")
    words = -(-payload_bytes // WORD)
    if not 0 < words * WORD <= pool.shape[1]:
        raise ValueError(f"payload_bytes is {payload_bytes}, wanted 1..{pool.shape[1]}, the size of a slot")
    if grid < 1:
        raise ValueError(f"grid is {grid}, wanted at least one block")
    if experts.numel():
        kernel((grid,), (THREADS,), (*_addresses(blocks, experts, slots, count, epoch, pool, ready, landed), stride, words))


def slot_ready(kernel: Kernel, slots: torch.Tensor, count: torch.Tensor, epoch: torch.Tensor, ready: torch.Tensor) -> None:
    """Raises the flags of listed slots; see `slot_ready_ref`. One launch of one block.

    slots int32 [n], count and epoch int32 [1], ready int32 [S].
    """
    check("ready", ready, ("S",), (torch.int32,))
    check("slots", slots, ("n",), (torch.int32,), like=ready)
    for name, tensor in (("count", count), ("epoch", epoch)):
        check(name, tensor, (1,), (torch.int32,), like=ready)
    if slots.numel():
        kernel((1,), (32,), _addresses(slots, count, epoch, ready))


def _addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
