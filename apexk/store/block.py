"""The expert block: one expert's weights as one contiguous run of bytes, the same on the host and in a GPU slot.

Row-major, in the weight dtype: `w13 [2I, H]` (gate rows, then up rows), then `w2 [H, I]`. Blocks start at multiples of
4 KiB, so a slot's stride is the block's size rounded up; a transfer is one copy of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGN_BYTES = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertBlock:
    """Shape of one expert: `hidden` H, `intermediate` I, `dtype` of its weights."""

    hidden: int
    intermediate: int
    dtype: torch.dtype

    def __post_init__(self):
        if self.hidden < 1 or self.intermediate < 1:
            raise ValueError(f"expert of H={self.hidden}, I={self.intermediate}: both must be positive")
        if self.dtype not in DTYPES:
            raise TypeError(f"expert weights are {self.dtype}; supported: {', '.join(str(d) for d in DTYPES)}")

    @property
    def elements(self) -> int:
        """Weights of one expert, 3*H*I."""
        return 3 * self.hidden * self.intermediate

    @property
    def payload_bytes(self) -> int:
        """Bytes that one copy moves."""
        return self.elements * self.dtype.itemsize

    @property
    def stride_bytes(self) -> int:
        """Distance between blocks, a multiple of 4 KiB."""
        return -(-self.payload_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def stride(self) -> int:
        """Distance between blocks in elements."""
        return self.stride_bytes // self.dtype.itemsize

    def w13(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[n, stride]` blocks -> a view of their gate and up rows, `[n, 2I, H]`."""
        n, (h, i) = blocks.shape[0], (self.hidden, self.intermediate)
        return blocks.as_strided((n, 2 * i, h), (self.stride, h, 1), blocks.storage_offset())

    def w2(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[n, stride]` blocks -> a view of their down projections, `[n, H, I]`."""
        n, (h, i) = blocks.shape[0], (self.hidden, self.intermediate)
        return blocks.as_strided((n, h, i), (self.stride, i, 1), blocks.storage_offset() + 2 * i * h)
