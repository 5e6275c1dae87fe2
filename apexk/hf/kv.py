"""Bytes of a model's cache of keys, values and states, asked of the model itself: a pass over shapes, without memory or arithmetic."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from apexk.hf.inspect import Experts

SHORT = 64  # tokens; where nothing but full attention and states of fixed size is cached, two short passes tell all lengths


def kv_bytes(like: PreTrainedModel, experts: Experts, batch: int, tokens: int) -> int:
    """What the library's own cache holds after `batch` sequences of `tokens` tokens have been through a model of the class and
    configuration of `like`, a skeleton or a whole one. `experts`: its sparse blocks, which are left out of the pass."""
    with torch.device("meta"), torch.no_grad():
        model = type(like)._from_config(copy.deepcopy(like.config), dtype=experts.dtype, attn_implementation="eager").eval()
        for name in experts.names:
            with_more = experts.family.returns is not None
            model.get_submodule(name).forward = lambda x, *_, with_more=with_more, **__: (x, None) if with_more else x
        decoder = model.get_decoder()

        def after(length: int) -> int:
            ids = torch.zeros(batch, length, dtype=torch.int64)
            return sum(t.numel() * t.element_size() for t in _tensors(decoder(input_ids=ids, use_cache=True)["past_key_values"]))

        config = like.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if tokens <= 2 * SHORT or any("sliding" in kind or "chunked" in kind for kind in kinds) or getattr(config, "sliding_window", None):
            return after(tokens)
        one, two = after(SHORT), after(2 * SHORT)
        return two + (two - one) * (tokens - 2 * SHORT) // SHORT


def _tensors(cache) -> list[torch.Tensor]:
    """Every tensor that a cache's layers hold, once."""
    found: dict[int, torch.Tensor] = {}

    def look(thing, depth: int) -> None:
        if isinstance(thing, torch.Tensor):
            found[id(thing)] = thing
        elif depth:
            inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
            for part in inner:
                look(part, depth - 1)

    look(cache, 6)
    return list(found.values())
