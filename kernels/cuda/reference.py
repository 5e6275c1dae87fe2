"""What the CUDA kernels compute, on CPU tensors: twins of `slot_gather` and `slot_ready` with the same arguments."""

from __future__ import annotations

import ctypes

import torch


def slot_gather_ref(blocks: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor, count: torch.Tensor, epoch: torch.Tensor,
                    pool: torch.Tensor, ready: torch.Tensor, payload_bytes: int) -> None:
    """pool[slots[i]] = block of experts[i] and ready[slots[i]] = epoch, for the first `count` entries.

    blocks int64 [E] addresses, experts and slots int32 [n], count and epoch int32 [1], pool uint8 [S, stride_bytes],
    ready int32 [S]. Entries with a negative expert or slot are left out.
    """
    for expert, slot in zip(experts[: int(count)].tolist(), slots[: int(count)].tolist(), strict=True):
        if expert >= 0 and slot >= 0:
            ctypes.memmove(pool[slot].data_ptr(), int(blocks[expert]), payload_bytes)
            ready[slot] = epoch[0]


def slot_ready_ref(slots: torch.Tensor, count: torch.Tensor, epoch: torch.Tensor, ready: torch.Tensor) -> None:
    """ready[slots[i]] = epoch for the first `count` entries whose slot is not negative."""
    for slot in slots[: int(count)].tolist():
        if slot >= 0:
            ready[slot] = epoch[0]
