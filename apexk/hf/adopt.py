"""Moves a model's expert weights into the host store and back, layer by layer, never holding a second copy of them all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from apexk.hf.inspect import PARTS, Experts, rows_of
from apexk.store.host_store import HostStore


def adopt(experts: Experts, store: HostStore) -> None:
    """Copies every layer's weights into `store` and points the parameters at it. Undone if it is interrupted."""
    try:
        for layer in range(len(experts.blocks)):
            weights = experts.weights(layer)
            store.put(layer, *rows_of(experts.family, weights))
            for part, view in zip(PARTS, _views(experts, store, layer), strict=True):
                getattr(weights, part).data = view
    except BaseException:
        release(experts, store)
        raise


def release(experts: Experts, store: HostStore) -> None:
    """Gives every parameter that still points at `store` contiguous memory of its own again. Can be called twice."""
    for layer in range(len(experts.blocks)):
        for part, view in zip(PARTS, _views(experts, store, layer), strict=True):
            parameter = getattr(experts.weights(layer), part)
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def adopted(experts: Experts, store: HostStore, layer: int) -> Callable[[], bool]:
    """-> whether a layer's parameters still are views of the store; `.to(...)` or a deep copy of the model break that."""
    weights = experts.weights(layer)
    wanted = [(part, view.data_ptr()) for part, view in zip(PARTS, _views(experts, store, layer), strict=True)]
    return lambda: all(getattr(weights, part).data_ptr() == pointer for part, pointer in wanted)


def _views(experts: Experts, store: HostStore, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The store's memory in the shapes of the model's parameters."""
    views = store.w13(layer), store.w2(layer)
    return tuple(v.transpose(1, 2) for v in views) if experts.family.columns else views
