"""The host store: all expert weights of a model in one anonymous private mapping, the only copy there is."""

from __future__ import annotations

import mmap

import torch

from apexk.store.block import ExpertBlock


class HostStore:
    """`layers` x `experts` expert blocks. Pages are taken from the system as they are first written.

    Views keep the mapping alive; it goes when the store and the last view are gone.
    """

    def __init__(self, layers: int, experts: int, block: ExpertBlock):
        if layers < 1 or experts < 1:
            raise ValueError(f"a store of {layers} layers x {experts} experts: both must be positive")
        self.layers, self.experts, self.block = layers, experts, block
        self.nbytes = layers * experts * block.stride_bytes
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # kernels without transparent huge pages: a wish, not a need
                pass

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
        offset = layer * self.experts * self.block.stride_bytes + start * self.block.dtype.itemsize
        return torch.frombuffer(self._map, dtype=self.block.dtype, count=count, offset=offset)
