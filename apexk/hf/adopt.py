"""Moves a model's expert weights into the host store and back, layer by layer, never holding a second copy of them all."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from apexk.hf.inspect import PARTS, Experts, rows_of
from apexk.store.host_store import HostStore, anonymous_tensor

_libc = ctypes.CDLL(None)


def _trim() -> None:
    """Gives the weights that were just replaced back to the system: the C library keeps freed memory otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class StoreViews:
    """A model's expert parameters as views of a store; knows when they no longer are, and when they were written to."""

    def __init__(self, experts: Experts, store: HostStore):
        self._experts, self._store = experts, store
        self._pointers: dict[int, tuple[int, ...]] = {}
        self._versions: dict[int, tuple[int, ...]] = {}

    def adopt(self) -> None:
        """Copies every layer's weights into the store and points the parameters at it. Undone if it is interrupted."""
        try:
            # tensors made in inference mode could not be written to outside of it
            with torch.inference_mode(False), torch.no_grad():
                for layer in range(len(self._experts.blocks)):
                    self._store.put(layer, *rows_of(self._experts.family, self._experts.weights(layer)))
                    views = self._views(layer)
                    self._pointers[layer] = tuple(view.data_ptr() for view in views)
                    for parameter, view in zip(self._parameters(layer), views, strict=True):
                        parameter.data = view
                    self._versions[layer] = self._version(layer)
                    _trim()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives every parameter that still points at the store contiguous memory of its own again, and the store's back to
        the system, layer by layer. Can be called twice."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in list(self._pointers):
                for parameter, pointer in zip(self._parameters(layer), self._pointers[layer], strict=True):
                    if parameter.data_ptr() == pointer:
                        parameter.data = anonymous_tensor(tuple(parameter.shape), parameter.dtype).copy_(parameter.detach())
                self._store.drop(layer)
                del self._pointers[layer]

    def in_place(self, layer: int) -> bool:
        """Whether a layer's parameters still are the store; `.to(...)` breaks that."""
        return tuple(p.data_ptr() for p in self._parameters(layer)) == self._pointers.get(layer)

    def changed(self, layer: int) -> bool:
        """Whether a layer's parameters were written to since this was last asked."""
        version = self._version(layer)
        if version == self._versions[layer]:
            return False
        self._versions[layer] = version
        return True

    def _version(self, layer: int) -> tuple[int, ...]:
        return tuple(0 if p.is_inference() else p._version for p in self._parameters(layer))

    def _parameters(self, layer: int) -> list[nn.Parameter]:
        weights = self._experts.weights(layer)
        return [getattr(weights, part) for part in PARTS]

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The store's memory in the shapes of the model's parameters."""
        views = self._store.w13(layer), self._store.w2(layer)
        return tuple(v.transpose(1, 2) for v in views) if self._experts.family.columns else views
