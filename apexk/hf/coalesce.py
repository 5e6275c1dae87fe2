"""Coalesced execution, as in CoX-MoE: attention by micro-batch, so that its working memory is a micro-batch's; experts once on
the whole batch, so that each expert's weights are read once for all its rows.

Only the attention function is taken apart: projections, router and experts see the whole batch as ever, and no token
changes. The cache of all requests stays where the library keeps it, on the model's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


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
    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **more):
        """query, key, value `[B, heads, length, head]` -> `[B, length, heads, head]`, as the library's own."""
        batch = query.shape[0]

        def part(given, rows: slice):
            """The rows' share of an argument that has one for each request."""
            return given[rows] if isinstance(given, torch.Tensor) and given.dim() > 1 and given.shape[0] == batch else given

        parts = []
        for start in range(0, batch, size):
            rows = slice(start, start + size)
            shares = {name: part(given, rows) for name, given in more.items()}
            parts.append(sdpa_attention_forward(module, query[rows], key[rows], value[rows], part(attention_mask, rows), **shares)[0])
        return torch.cat(parts), None

    return attention
