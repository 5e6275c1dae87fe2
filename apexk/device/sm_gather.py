"""Exact copies by a kernel that reads pinned host memory, instead of by a copy engine (`transfer="sm_gather"`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apexk.device.cuda_buffers import PinnedRows
from apexk.device.gpu_kernels import GpuKernels
from apexk.device.runtime import CudaRuntime, Stream
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool


class SmGather:
    """For a store that is pinned. The copies of a call are one launch, whose list goes to the device ahead of it on the same stream."""

    def __init__(self, runtime: CudaRuntime, store: HostStore, pool: Pool, kernels: GpuKernels):
        self._runtime, self._kernels, self._payload = runtime, kernels, store.block.payload_bytes
        offsets = torch.arange(store.experts, dtype=torch.int64) * store.block.stride_bytes
        self._blocks = [(runtime.device_address(store.blocks(layer)) + offsets).to(runtime.device) for layer in range(store.layers)]
        self._numbers = torch.arange(max(store.experts + 1, 2), dtype=torch.int32, device=runtime.device)
        self._pool = pool.memory.view(torch.uint8)
        self._ready = torch.zeros(pool.slots, dtype=torch.int32, device=runtime.device)
        self._landed = torch.zeros(store.experts, dtype=torch.int32, device=runtime.device)
        self._lists = PinnedRows(runtime, 2 * store.experts, 8)
        self._list = runtime.empty_device((2 * store.experts,), torch.int32)

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Puts the copies, (expert, slot) of each, on `stream`, which is that of every call."""
        count = len(copies)
        host, _ = self._lists.take()
        host[: 2 * count] = [expert for expert, _ in copies] + [slot for _, slot in copies]
        self._runtime.copy_async(self._list.data_ptr(), host.ctypes.data, 2 * count * host.itemsize, True, stream)
        experts, slots, landed = self._list[:count], self._list[count : 2 * count], self._landed[:count]
        epoch = self._number(1)  # nobody polls the flags, an event orders the readers
        self._runtime.launch(stream, lambda: self._kernels.gather(
            self._blocks[layer], experts, slots, self._number(count), epoch, self._pool, self._ready, landed, self._payload))

    def reset(self) -> None:
        """The layer's copies are done: the next one's lists may use their memory."""
        self._lists.reset()

    def _number(self, value: int) -> torch.Tensor:
        return self._numbers[value : value + 1]
