"""A cache of keys and values of which some requests' part lies in host memory: their attention is the CPU's (CoX-MoE's selective
attention offload). To be used within `apexk.hf.coalesce.coalesced`, whose attention knows it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class Split(NamedTuple):
    """One layer's keys or values, `[requests, heads, length, head]`: the first requests on the model's device, the others on the host."""

    device: torch.Tensor
    host: torch.Tensor


class SplitLayer(DynamicLayer):
    """Grows as the library's own; `update` returns `Split`s. The requests stay where they began."""

    is_croppable = False

    def __init__(self, on_host: float):
        super().__init__()
        self.on_host = on_host
        self.parts: list[Split] = []  # keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Split, Split]:
        batch = key_states.shape[0]
        here = batch - round(self.on_host * batch)
        new = [Split(states[:here], states[here:].to("cpu")) for states in (key_states, value_states)]
        if not self.parts:
            self.parts, self.is_initialized = new, True
        else:
            old = self.parts[0]
            if (old.device.shape[0], old.host.shape[0]) != (here, batch - here):
                raise ValueError(f"a split cache of {old.device.shape[0]} + {old.host.shape[0]} requests got {batch}")
            self.parts = [Split(*(torch.cat(pair, dim=-2) for pair in zip(held, more, strict=True))) for held, more in zip(self.parts, new, strict=True)]
        return tuple(self.parts)

    def get_seq_length(self) -> int:
        return self.parts[0].device.shape[-2] if self.parts else 0

    def reset(self) -> None:
        self.parts, self.is_initialized = [], False

    def _refuse(self, *_):
        raise ValueError("a split cache cannot be reordered, repeated or cut: no beam search, no assisted decoding")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class SplitCache(Cache):
    """`on_host`: share of the requests, the last ones of a batch, whose cache lies in host memory. Pass it to `model.generate` as
    `past_key_values`. Raises ValueError for a share that is none, and for a model whose layers keep anything else than all
    keys and values."""

    def __init__(self, model: PreTrainedModel, on_host: float):
        if isinstance(on_host, (bool, str)) or not 0 <= on_host <= 1:
            raise ValueError(f"on_host is {on_host!r}; wanted a share of the requests, 0 to 1")
        own = DynamicCache(config=model.config).layers
        other = sorted({type(layer).__name__ for layer in own if type(layer) is not DynamicLayer})
        if other:
            raise ValueError(f"the cache of {type(model).__name__} has layers of kind {', '.join(other)}; only full attention can be split")
        super().__init__(layers=[SplitLayer(on_host) for _ in own])

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by place: "device" and "host"."""
        parts = [part for layer in self.layers for part in layer.parts]
        return {where: sum(t.numel() * t.element_size() for t in (getattr(part, where) for part in parts)) for where in Split._fields}
