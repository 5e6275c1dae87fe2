"""The host store: all expert weights of a model in anonymous private mappings, the only copy there is."""

from __future__ import annotations

import math
import mmap

import torch

from apexk.store.block import ExpertBlock


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed memory that goes back to the system as soon as nothing refers to it; a large `malloc` may stay in the heap."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # kernels without transparent huge pages: a wish, not a need
            pass
    return memory


def anonymous_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor in such memory, not initialised to anything useful."""
    count = math.prod(shape)
    return torch.frombuffer(anonymous(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class HostStore:
    """`layers` x `experts` expert blocks, one mapping a layer. Pages are taken from the system as they are first written.

    Views keep their mapping alive: a layer's memory goes once the store has dropped it and the last view is gone.
    """

    def __init__(self, layers: int, experts: int, block: ExpertBlock):
        if layers < 1 or experts < 1:
            raise ValueError(f"a store of {layers} layers x {experts} experts: both must be positive")
        self.layers, self.experts, self.block = layers, experts, block
        self.nbytes = layers * experts * block.stride_bytes
        self._maps: list[mmap.mmap | None] = [anonymous(experts * block.stride_bytes) for _ in range(layers)]

    def drop(self, layer: int) -> None:
        """Gives a layer's memory up; it can no longer be asked for."""
        self._maps[layer] = None

    def blocks(self, layer: int) -> torch.Tensor:
        """One layer's blocks, `[E, stride]` in the weight dtype."""
        return self._tensor(layer, 0, self.experts * self.block.stride).view(self.experts, self.block.stride)

    def w13(self, layer: int) -> torch.Tensor:
        """`[E, 2I, H]` view with a storage of its own, fit to be a module's parameter."""
        return self.block.w13(self.blocks(layer))

    def w2(self, layer: int) -> torch.Tensor:
        """`[E, H, I]` view. Its storage starts at the first down projection: code that tells tensors apart by the
        address of their storage (safetensors' check for shared weights) must not take it for `w13`."""
        start = 2 * self.block.intermediate * self.block.hidden
        flat = self._tensor(layer, start, self.experts * self.block.stride - start)
        shape = (self.experts, self.block.hidden, self.block.intermediate)
        return flat.as_strided(shape, (self.block.stride, self.block.intermediate, 1))

    def addresses(self, layer: int) -> torch.Tensor:
        """Host addresses of a layer's blocks, int64 `[E]`."""
        base = self.blocks(layer).data_ptr()
        return base + torch.arange(self.experts, dtype=torch.int64) * self.block.stride_bytes

    def put(self, layer: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Copies a layer's experts in: `w13 [E, 2I, H]`, `w2 [E, H, I]`, any strides, the store's dtype."""
        self.w13(layer).copy_(w13)
        self.w2(layer).copy_(w2)

    def _tensor(self, layer: int, start: int, count: int) -> torch.Tensor:
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a store of {self.layers}")
        if self._maps[layer] is None:
            raise RuntimeError(f"layer {layer} of the store was dropped")
        return torch.frombuffer(self._maps[layer], dtype=self.block.dtype, count=count, offset=start * self.block.dtype.itemsize)
