"""The GPU pool: one allocation with `slots` expert blocks for every layer."""

from __future__ import annotations

import torch

from apexk.store.block import ExpertBlock


class Pool:
    """`layers` x `slots` blocks, in `memory [layers, slots, stride]` or else in host memory of its own, which starts as NaN: a
    read of an unfilled slot must show."""

    def __init__(self, layers: int, slots: int, block: ExpertBlock, memory: torch.Tensor | None = None):
        self.block, self.slots = block, slots
        if memory is None:
            memory = torch.full((layers, slots, block.stride), float("nan"), dtype=block.dtype)
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    def blocks(self, layer: int) -> torch.Tensor:
        """`[slots, stride]`."""
        return self.memory[layer]

    def w13(self, layer: int) -> torch.Tensor:
        """`[slots, 2I, H]` view."""
        return self.block.w13(self.memory[layer])

    def w2(self, layer: int) -> torch.Tensor:
        """`[slots, H, I]` view."""
        return self.block.w2(self.memory[layer])

    def b13(self, layer: int) -> torch.Tensor | None:
        """`[slots, 2I]` view, or None."""
        return self.block.b13(self.memory[layer])

    def b2(self, layer: int) -> torch.Tensor | None:
        """`[slots, H]` view, or None."""
        return self.block.b2(self.memory[layer])

    def addresses(self, layer: int) -> torch.Tensor:
        """Addresses of a layer's slots, int64 `[slots]`."""
        return self.memory[layer].data_ptr() + torch.arange(self.slots, dtype=torch.int64) * self.block.stride_bytes
