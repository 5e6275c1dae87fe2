"""How experts modules keep their weights, and what that is in the store's order.

A layout is one function: the module's parameters -> views of them as the six parts of the normative block,

    gate [E, I, H], up [E, I, H], down [E, H, I]  and, with biases,  gate [E, I], up [E, I], down [E, H]

Copying between these views and the store's own serves both directions. Where a parameter is such a part of the store as
it is (rows, or transposed rows) it becomes a view of the store while a model is swapped; where it cannot be one (the
interleaved gate and up of gpt-oss, the flat matrices of DBRX) it is a `StoredParameter` meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import nn

from apexk.store.host_store import HostStore

Matrices = tuple[torch.Tensor, ...]  # three, or six with biases


@dataclass(frozen=True)
class Layout:
    """names: the parameters, as paths below the experts module. matrices: (their values in that order, E) -> the six or
    three views. views: by name, what the parameter is in a store; the others cannot be views of it."""

    names: tuple[str, ...]
    matrices: Callable[[Sequence[torch.Tensor], int], Matrices]
    views: dict[str, Callable[[HostStore, int], torch.Tensor]] = field(default_factory=dict)

    def parameters(self, weights: nn.Module) -> list[nn.Parameter]:
        """Raises AttributeError where the module has none of a name."""
        return [reduce(getattr, name.split("."), weights) for name in self.names]


def usual(*, transposed: bool = False, interleaved: bool = False, biases: bool = False) -> Layout:
    """The layouts of the library's experts interface: `gate_up_proj [E, 2I, H]`, `down_proj [E, H, I]`, their biases.

    transposed: `[E, H, 2I]` and `[E, I, H]`. interleaved: gate and up rows in turns, not gate first.
    """

    def matrices(tensors: Sequence[torch.Tensor], experts: int) -> Matrices:
        both, down, *more = tensors
        if transposed:
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        found = (*_split(both, interleaved), down)
        return (*found, *_split(more[0], interleaved), more[1]) if biases else found

    def rows(part: str) -> Callable[[HostStore, int], torch.Tensor]:
        return lambda store, layer: getattr(store, part)(layer)

    def columns(part: str) -> Callable[[HostStore, int], torch.Tensor]:
        return lambda store, layer: getattr(store, part)(layer).transpose(1, 2)

    matrix = columns if transposed else rows
    views = {"down_proj": matrix("w2")} | ({} if interleaved else {"gate_up_proj": matrix("w13")})
    if biases:
        views |= {"down_proj_bias": rows("b2")} | ({} if interleaved else {"gate_up_proj_bias": rows("b13")})
    names = ("gate_up_proj", "down_proj") + (("gate_up_proj_bias", "down_proj_bias") if biases else ())
    return Layout(names, matrices, views)


def _split(both: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return both[:, ::2], both[:, 1::2]
    half = both.shape[1] // 2
    return both[:, :half], both[:, half:]


def _flat(tensors: Sequence[torch.Tensor], experts: int) -> Matrices:
    gate, up, down = (t.view(experts, -1, t.shape[-1]) for t in tensors)
    return gate, up, down.transpose(1, 2)


#: DBRX: w1, v1 and w2 are [E*I, H] each
FLAT = Layout(("mlp.w1", "mlp.v1", "mlp.w2"), _flat)


def layout_of(weights: nn.Module) -> Layout | None:
    """The layout that an experts module on the library's interface says it has; None for a module that is not on it."""
    if not hasattr(weights, "is_transposed"):
        return None
    return usual(transposed=weights.is_transposed, interleaved=not weights.is_concatenated, biases=weights.has_bias)


def stored(store: HostStore, layer: int) -> Matrices:
    """A layer of the store as the same six or three views."""
    half = store.block.intermediate
    w13, b13 = store.w13(layer), store.b13(layer)
    found = (w13[:, :half], w13[:, half:], store.w2(layer))
    return found if b13 is None else (*found, b13[:, :half], b13[:, half:], store.b2(layer))


def put(layout: Layout, tensors: Sequence[torch.Tensor], store: HostStore, layer: int) -> None:
    """Copies a module's parameters into the store; those on the meta device are left out."""
    for there, here in zip(stored(store, layer), layout.matrices(tensors, store.experts), strict=True):
        if here.device.type != "meta":
            there.copy_(here)


def take(layout: Layout, tensors: Sequence[torch.Tensor], store: HostStore, layer: int) -> None:
    """Fills a module's parameters from the store, likewise."""
    for there, here in zip(stored(store, layer), layout.matrices(tensors, store.experts), strict=True):
        if here.device.type != "meta":
            here.copy_(there)
