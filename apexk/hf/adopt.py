"""Moves a model's expert weights into the host store and back, layer by layer, never holding a second copy of them all."""

from __future__ import annotations

import torch
from torch import nn

from apexk.hf.families import Experts
from apexk.store.host_store import HostStore

PARTS = (("gate_up_proj", HostStore.w13), ("down_proj", HostStore.w2))


def adopt(experts: Experts, store: HostStore) -> None:
    """Copies every layer's weights into `store` and points the parameters at it. Undone if it is interrupted."""
    try:
        for layer in range(len(experts.blocks)):
            weights = experts.weights(layer)
            store.put(layer, weights.gate_up_proj.detach(), weights.down_proj.detach())
            for part, view in PARTS:
                getattr(weights, part).data = view(store, layer)
    except BaseException:
        release(experts, store)
        raise


def release(experts: Experts, store: HostStore) -> None:
    """Gives every parameter that still points at `store` contiguous memory of its own again. Can be called twice."""
    for layer in range(len(experts.blocks)):
        for part, view in PARTS:
            parameter = getattr(experts.weights(layer), part)
            if parameter.data_ptr() == view(store, layer).data_ptr():
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def adopted(weights: nn.Module, store: HostStore, layer: int) -> bool:
    """Whether both parameters still are views of the store; `.to(...)` or `load_state_dict(assign=True)` break that."""
    return all(getattr(weights, part).data_ptr() == view(store, layer).data_ptr() for part, view in PARTS)
