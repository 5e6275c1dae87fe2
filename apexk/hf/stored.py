"""A parameter whose values lie in the store in an order that no view of it can show.

While its model is swapped, such a parameter holds one NaN for all of its elements: it has its shape and its dtype, takes
no memory, and whoever computes from it sees it at once. What reads or writes a parameter as a whole gets or sets its
values: `detach` (and so `state_dict` and `save_pretrained`), `copy_` (`load_state_dict`), `copy.deepcopy`, pickling.
Other writes are refused by torch, since all elements share one place, or have no effect (`fill_`, `zero_`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from apexk.hf.layouts import Layout, put, take
from apexk.store.host_store import HostStore


@dataclass
class Place:
    """Where a parameter's values are."""

    layout: Layout
    name: str
    store: HostStore
    layer: int
    shapes: tuple[torch.Size, ...]  # of all parameters of the layout
    own: type  # the parameter's class when it is not stored
    writes: int = 0

    def among(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The layout's parameters, only this one with values."""
        return [values if name == self.name else torch.empty(shape, dtype=values.dtype, device="meta")
                for name, shape in zip(self.layout.names, self.shapes, strict=True)]


class StoredParameter(nn.Parameter):
    """Made of a plain parameter by `hide`, and a plain one again after `show`; always the same object."""

    place: Place

    def values(self) -> torch.Tensor:
        """A contiguous copy of the values, in the store's dtype."""
        values = torch.empty(self.shape, dtype=self.place.store.block.dtype)
        with torch.no_grad():
            take(self.place.layout, self.place.among(values), self.place.store, self.place.layer)
        return values

    def detach(self) -> torch.Tensor:
        return self.values()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> StoredParameter:
        if source.shape != self.shape:
            raise ValueError(f"{self.place.name} is {tuple(self.shape)}, got {tuple(source.shape)}")
        with torch.no_grad():
            put(self.place.layout, self.place.among(source.to("cpu")), self.place.store, self.place.layer)
        self.place.writes += 1
        return self

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        return memo.setdefault(id(self), self.place.own(self.values(), self.requires_grad))

    def __reduce_ex__(self, protocol):
        return torch._utils._rebuild_parameter, (self.values(), self.requires_grad, OrderedDict())


def hide(parameter: nn.Parameter, place: Place) -> None:
    """From now on the parameter's values are those in the store. Interrupted anywhere in between, `show` still finds them."""
    parameter.place = place
    parameter.__class__ = StoredParameter
    parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)


def show(parameter: StoredParameter, memory: torch.Tensor) -> None:
    """The parameter is a plain one again, with its values in `memory`, which has its shape."""
    place = parameter.place
    alone = all(stride == 0 for stride, size in zip(parameter.data.stride(), parameter.shape, strict=True) if size > 1)
    # as `hide` left it, whatever was filled into it, or a conversion of that (`model.to(...)`)
    if alone or bool(parameter.data.reshape(-1)[:1].isnan().all()):
        with torch.no_grad():
            take(place.layout, place.among(memory), place.store, place.layer)
        kind, device = parameter.dtype, parameter.device
        parameter.data = memory.to(device, kind)
    parameter.__class__ = place.own
    del parameter.place
