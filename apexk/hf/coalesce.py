"""Coalesced execution, as in CoX-MoE: attention by micro-batch, so that its working memory is a micro-batch's; experts once on
the whole batch, so that each expert's weights are read once for all its rows.

Only the attention function is taken apart: projections, router and experts see the whole batch as ever, and no token
changes. With a `SplitCache` some requests' attention is the CPU's, over a cache in host memory: nothing overlaps it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from apexk.hf.split_cache import Split


@contextmanager
def coalesced(model: PreTrainedModel, micro_batch: int) -> Iterator[PreTrainedModel]:
    """Within the block `model`'s attention runs `micro_batch` requests at a time, by torch's SDPA; after it as before.

    Works with a swapped model and with a plain one. Raises ValueError for a size below 1, TypeError for a model whose
    attention function cannot be chosen.
    """
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch!r}; wanted a whole number of requests, at least 1")
    name, before = f"apexk_by_{micro_batch}", model.config._attn_implementation
    AttentionInterface.register(name, _by_micro_batch(micro_batch))
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise TypeError(f"{type(model).__name__} does not let its attention function be chosen, so it cannot be coalesced")
        yield model
    finally:
        model.set_attn_implementation(before)


def _by_micro_batch(size: int):
    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor | Split, value: torch.Tensor | Split, attention_mask: torch.Tensor | None, **more):
        """query, key, value `[B, heads, length, head]` -> `[B, length, heads, head]`, as the library's own."""
        batch = query.shape[0]

        def run(rows: slice, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            """`rows` of the batch, on the device of their keys."""

            def part(given):
                """The rows' share of an argument that has one for each request."""
                shared = isinstance(given, torch.Tensor) and given.dim() > 1 and given.shape[0] == batch
                return given[rows].to(keys.device) if shared else given

            shares = {name: part(given) for name, given in more.items()}
            return sdpa_attention_forward(module, part(query), keys, values, part(attention_mask), **shares)[0].to(query.device)

        pairs = zip(key, value, strict=True) if isinstance(key, Split) else [(key, value)]
        outputs, first = [], 0
        for keys, values in pairs:
            for start in range(0, keys.shape[0], size):
                end = min(start + size, keys.shape[0])
                outputs.append(run(slice(first + start, first + end), keys[start:end], values[start:end]))
            first += keys.shape[0]
        return torch.cat(outputs), None

    return attention
