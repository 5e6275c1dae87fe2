"""The expert block: one expert's weights as one contiguous run of bytes, the same on the host and in a GPU slot.

Row-major, in the weight dtype: `w13 [2I, H]` (gate rows, then up rows), then `w2 [H, I]`, then, where experts have
biases, `b13 [2I]` and `b2 [H]`. Blocks start at multiples of 4 KiB, so a slot's stride is the block's size rounded up; a
transfer is one copy of the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_BYTES = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertBlock:
    """Shape of one expert: `hidden` H, `intermediate` I, `dtype` of its weights; whether it has `biases`."""

    hidden: int
    intermediate: int
    dtype: torch.dtype
    biases: bool = False

    def __post_init__(self):
        if self.hidden < 1 or self.intermediate < 1:
            raise ValueError(f"expert of H={self.hidden}, I={self.intermediate}: both must be positive")
        if self.dtype not in DTYPES:
            raise TypeError(f"expert weights are {self.dtype}; supported: {', '.join(str(d) for d in DTYPES)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a block is made of, in its order."""
        h, i = self.hidden, self.intermediate
        return {"w13": (2 * i, h), "w2": (h, i)} | ({"b13": (2 * i,), "b2": (h,)} if self.biases else {})

    @property
    def elements(self) -> int:
        """Weights of one expert: 3*H*I, and 2*I + H biases."""
        return sum(map(math.prod, self.shapes.values()))

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

    def start(self, part: str) -> int:
        """Where a part begins in its block, in elements."""
        names = list(self.shapes)
        return sum(math.prod(self.shapes[name]) for name in names[: names.index(part)])

    def view(self, part: str, blocks: torch.Tensor) -> torch.Tensor | None:
        """`[n, stride]` blocks -> a view of one part, `[n, *shape]`; None where this expert has no such part."""
        if part not in self.shapes:
            return None
        return blocks.as_strided(*self.geometry(part, blocks.shape[0]), blocks.storage_offset() + self.start(part))

    def geometry(self, part: str, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a part of `count` blocks."""
        shape = self.shapes[part]
        return (count, *shape), (self.stride, *(math.prod(shape[i + 1 :]) for i in range(len(shape))))

    def w13(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[n, stride]` blocks -> a view of their gate and up rows, `[n, 2I, H]`."""
        return self.view("w13", blocks)

    def w2(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[n, stride]` blocks -> a view of their down projections, `[n, H, I]`."""
        return self.view("w2", blocks)

    def b13(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """`[n, stride]` blocks -> a view of their gate and up biases, `[n, 2I]`, or None."""
        return self.view("b13", blocks)

    def b2(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """`[n, stride]` blocks -> a view of their down biases, `[n, H]`, or None."""
        return self.view("b2", blocks)
