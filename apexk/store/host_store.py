"""The host store: all expert weights of a model in anonymous private mappings, the only copy there is."""

from __future__ import annotations

import logging
import math
import mmap

import torch

from apexk.store import nodes
from apexk.store.block import ExpertBlock
from apexk.store.pinning import CHUNK_BYTES, Pinning, Pins, Registry

log = logging.getLogger("apexk.store")


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
    """`layers` x `experts` expert blocks, one mapping a layer. Pages are taken from the system as they are first written, on a
    machine with several memory nodes from each for its share of the experts (`nodes`; empty where the system chooses).

    Views keep their mapping alive: a layer's memory goes once the store has dropped it and the last view is gone. `root`: a
    folder with copies of /proc and /sys files, to be read in place of this machine's; `bind` as `nodes.prefer`.
    """

    def __init__(self, layers: int, experts: int, block: ExpertBlock, *, root: str = "", bind: nodes.Bind = nodes.prefer):
        if layers < 1 or experts < 1:
            raise ValueError(f"a store of {layers} layers x {experts} experts: both must be positive")
        self.layers, self.experts, self.block = layers, experts, block
        self.nbytes = layers * experts * block.stride_bytes
        self._maps: list[mmap.mmap | None] = [anonymous(experts * block.stride_bytes) for _ in range(layers)]
        self.nodes = self._spread(nodes.usable_nodes(root), bind)
        self.pinning: Pinning | None = None  # what came of `pin`; None where nobody asked
        self._pins: Pins | None = None

    def drop(self, layer: int) -> None:
        """Gives a layer's memory up; it can no longer be asked for."""
        if self._pins is not None:
            self._pins.release(layer)
        self._maps[layer] = None

    def pin(self, registry: Registry, chunk_bytes: int = CHUNK_BYTES) -> Pinning:
        """Pins the weights, once they are there: registration takes every page from the system. All or nothing, see
        `Pinning`; `unpin` it before the registry closes."""
        self._pins = Pins(registry)
        layers = [(layer, self.blocks(layer).data_ptr(), len(memory)) for layer, memory in enumerate(self._maps) if memory is not None]
        self.pinning = self._pins.pin(layers, self.block.stride_bytes, chunk_bytes)
        return self.pinning

    def unpin(self) -> None:
        """May be called again, and without `pin`."""
        if self._pins is not None:
            self._pins.release()
            self._pins = None

    def blocks(self, layer: int) -> torch.Tensor:
        """One layer's blocks, `[E, stride]` in the weight dtype."""
        return self._tensor(layer, 0, self.experts * self.block.stride).view(self.experts, self.block.stride)

    def w13(self, layer: int) -> torch.Tensor:
        """`[E, 2I, H]` view with a storage of its own, fit to be a module's parameter."""
        return self._part(layer, "w13")

    def w2(self, layer: int) -> torch.Tensor:
        """`[E, H, I]` view, likewise."""
        return self._part(layer, "w2")

    def b13(self, layer: int) -> torch.Tensor | None:
        """`[E, 2I]` view, likewise; None without biases."""
        return self._part(layer, "b13")

    def b2(self, layer: int) -> torch.Tensor | None:
        """`[E, H]` view, likewise; None without biases."""
        return self._part(layer, "b2")

    def addresses(self, layer: int) -> torch.Tensor:
        """Host addresses of a layer's blocks, int64 `[E]`."""
        base = self.blocks(layer).data_ptr()
        return base + torch.arange(self.experts, dtype=torch.int64) * self.block.stride_bytes

    def put(self, layer: int, w13: torch.Tensor, w2: torch.Tensor, b13: torch.Tensor | None = None, b2: torch.Tensor | None = None) -> None:
        """Copies a layer's experts in: `w13 [E, 2I, H]`, `w2 [E, H, I]`, `b13 [E, 2I]`, `b2 [E, H]`, any strides, the
        store's dtype."""
        for part, values in (("w13", w13), ("w2", w2), ("b13", b13), ("b2", b2)):
            if part in self.block.shapes:
                self._part(layer, part).copy_(values)

    def _spread(self, usable: list[int], bind: nodes.Bind) -> list[int]:
        if len(usable) < 2:
            return []
        try:
            for memory in self._maps:
                nodes.spread(memory, self.experts, usable, bind)
        except OSError as error:
            log.warning("experts lie on whatever memory node the system chooses, not spread over nodes %s: %s", usable, error)
            return []
        return usable

    def _part(self, layer: int, part: str) -> torch.Tensor | None:
        """The storage starts at the part's first value: code that tells tensors apart by the address of their storage
        (safetensors' check for shared weights) must not take two parts for one."""
        if part not in self.block.shapes:
            return None
        start = self.block.start(part)
        flat = self._tensor(layer, start, self.experts * self.block.stride - start)
        return flat.as_strided(*self.block.geometry(part, self.experts))

    def _tensor(self, layer: int, start: int, count: int) -> torch.Tensor:
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a store of {self.layers}")
        if self._maps[layer] is None:
            raise RuntimeError(f"layer {layer} of the store was dropped")
        return torch.frombuffer(self._maps[layer], dtype=self.block.dtype, count=count, offset=start * self.block.dtype.itemsize)
