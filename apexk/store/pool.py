"""The GPU pool: one allocation of expert blocks, its slots numbered through whichever layer has them."""

from __future__ import annotations

import torch

from apexk.store.block import ExpertBlock


class Pool:
    """`slots` blocks, in `memory [slots, stride]` or else in host memory of its own, which starts as NaN: a read of an unfilled
    slot must show."""

    def __init__(self, slots: int, block: ExpertBlock, memory: torch.Tensor | None = None):
        self.block, self.slots = block, slots
        if memory is None:
            memory = torch.full((slots, block.stride), float("nan"), dtype=block.dtype)
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    @property
    def w13(self) -> torch.Tensor:
        """`[slots, 2I, H]` view."""
        return self.block.w13(self.memory)

    @property
    def w2(self) -> torch.Tensor:
        """`[slots, H, I]` view."""
        return self.block.w2(self.memory)

    @property
    def b13(self) -> torch.Tensor | None:
        """`[slots, 2I]` view, or None."""
        return self.block.b13(self.memory)

    @property
    def b2(self) -> torch.Tensor | None:
        """`[slots, H]` view, or None."""
        return self.block.b2(self.memory)

    def addresses(self) -> torch.Tensor:
        """Addresses of the slots, int64 `[slots]`."""
        return self.memory.data_ptr() + torch.arange(self.slots, dtype=torch.int64) * self.block.stride_bytes
