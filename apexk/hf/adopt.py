"""Moves a model's expert weights into the host store and back, layer by layer, never holding a second copy of them all."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from apexk.hf.inspect import Experts
from apexk.hf.layouts import put
from apexk.hf.stored import Place, StoredParameter, hide, show
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
        self._layout = experts.layout
        self._pointers: dict[int, tuple[int, ...]] = {}
        self._versions: dict[int, tuple[int, ...]] = {}

    def adopt(self, *, filled: bool = False) -> None:
        """Copies every layer's weights into the store, unless it is `filled` already, and points the parameters at it.
        Undone if it is interrupted."""
        try:
            # tensors made in inference mode could not be written to outside of it
            with torch.inference_mode(False), torch.no_grad():
                for layer in range(len(self._experts.blocks)):
                    parameters = self._parameters(layer)
                    if not filled:
                        put(self._layout, [p.detach() for p in parameters], self._store, layer)
                    self._point(layer, parameters)
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
                    if isinstance(parameter, StoredParameter):
                        show(parameter, anonymous_tensor(tuple(parameter.shape), self._store.block.dtype))
                    elif parameter.data_ptr() == pointer:
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

    def _point(self, layer: int, parameters: list[nn.Parameter]) -> None:
        shapes = tuple(p.shape for p in parameters)
        views = {name: view(self._store, layer) for name, view in self._layout.views.items()}
        # known before the first one moves: an interrupt in between must find them
        self._pointers[layer] = tuple(views[n].data_ptr() if n in views else -1 for n in self._layout.names)
        for name, parameter in zip(self._layout.names, parameters, strict=True):
            if name in views:
                parameter.data = views[name]
            else:
                hide(parameter, Place(self._layout, name, self._store, layer, shapes, type(parameter)))
        self._pointers[layer] = tuple(p.data_ptr() for p in parameters)
        self._versions[layer] = self._version(layer)

    def _version(self, layer: int) -> tuple[int, ...]:
        return tuple(_version(p) for p in self._parameters(layer))

    def _parameters(self, layer: int) -> list[nn.Parameter]:
        return self._layout.parameters(self._experts.weights(layer))


def _version(parameter: nn.Parameter) -> int:
    if isinstance(parameter, StoredParameter):
        return parameter.place.writes
    return 0 if parameter.is_inference() else parameter._version
