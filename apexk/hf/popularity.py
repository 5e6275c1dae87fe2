"""Counts how often a model's own routers choose each expert on a calibration text, for a pool's first residents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from apexk.hf.inspect import UnsupportedModel, find_experts


@torch.no_grad()
def popularity(model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]) -> list[list[int]]:
    """Activation counts `[layers][experts]` over `batches` of model inputs, for `ApexConfig(popularity=...)`.

    Runs `model(**batch)` for each batch; take a text that is not the one to be evaluated. Padding counts as any token.
    Raises `UnsupportedModel`, and ValueError where no token was counted. The model is left as it was.
    """
    experts = find_experts(model)
    if experts.family.router is None:
        raise UnsupportedModel(f"the routing of {experts.model_type} cannot be counted: apexk knows no router that gives its expert ids")
    counts = torch.zeros(len(experts.blocks), experts.experts, dtype=torch.int64)

    def count(layer: int):
        def hook(_module, _inputs, output):
            ids = experts.family.routing(output, experts.blocks[layer])[2]
            counts[layer] += torch.bincount(ids.reshape(-1).cpu(), minlength=experts.experts)

        return hook

    hooks = [experts.router(layer).register_forward_hook(count(layer)) for layer in range(len(experts.blocks))]
    try:
        for batch in batches:
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not counts.any():
        raise ValueError("batches held no tokens; wanted at least one batch of model inputs, such as tokenizer(text, return_tensors='pt')")
    return counts.tolist()
