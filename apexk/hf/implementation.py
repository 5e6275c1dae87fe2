"""`experts_implementation="apexk"`: the second way in, by the library's own registry of experts functions.

    apexk.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="apexk")   # or model.set_experts_implementation("apexk")
    handle = apexk.swap(model, config)

A model that says so is swapped at its experts: its blocks run their own forward. Before `swap`, after `restore` and in a
deep copy the name stands for the library's plain loop over experts, which is logged once.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

log = logging.getLogger("apexk")
NAME = "apexk"
_told: set[str] = set()


def register() -> str:
    """Makes the name known to the library; returns it. May be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _plain)
    return NAME


def asked_for(weights: nn.Module) -> bool:
    """Whether this experts module is on the library's interface and its configuration names apexk."""
    return getattr(getattr(weights, "config", None), "_experts_implementation", None) == NAME and hasattr(weights, "is_transposed")


def _plain(self: nn.Module, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Runs where the model is not swapped; a swapped module has a forward of its own."""
    kind = type(self).__name__
    if kind not in _told:
        _told.add(kind)
        log.warning("experts_implementation is %r, but this model is not swapped: %s runs the library's plain loop (apexk.swap(model) makes it run here)", NAME, kind)
    return type(self).forward.__wrapped__(self, hidden_states, topk_ids, topk_weights)
