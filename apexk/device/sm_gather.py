"""Exact copies by a kernel that reads pinned host memory, instead of by a copy engine (`transfer="sm_gather"`)."""

from __future__ import annotations

import torch

from apexk.device.gpu_kernels import GpuKernels
from apexk.device.runtime import CudaRuntime
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool


class SmGather:
    """For a store that is pinned. Lists of one expert come from a table that stays on the device: a copy writes nothing to it."""

    def __init__(self, runtime: CudaRuntime, store: HostStore, pool: Pool, kernels: GpuKernels):
        self._kernels, self._payload = kernels, store.block.payload_bytes
        offsets = torch.arange(store.experts, dtype=torch.int64) * store.block.stride_bytes
        self._blocks = [(runtime.device_address(store.blocks(layer)) + offsets).to(runtime.device) for layer in range(store.layers)]
        self._numbers = torch.arange(max(store.experts, pool.slots, 2), dtype=torch.int32, device=runtime.device)
        self._pool = pool.memory.view(torch.uint8)
        self._ready = torch.zeros(pool.slots, dtype=torch.int32, device=runtime.device)
        self._landed = torch.zeros(1, dtype=torch.int32, device=runtime.device)

    def copy(self, layer: int, expert: int, slot: int) -> None:
        """Launches the copy on the current stream."""
        one = self._number(1)  # entry, and epoch 1: nobody polls these flags, an event orders the readers
        self._kernels.gather(self._blocks[layer], self._number(expert), self._number(slot), one, one, self._pool, self._ready,
                             self._landed, self._payload)

    def _number(self, value: int) -> torch.Tensor:
        return self._numbers[value : value + 1]
