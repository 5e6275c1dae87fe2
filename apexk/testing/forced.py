"""Routing from a trace in place of the routers' own: random weights route almost uniformly, real text does not.

    with forced(model, trace.read("sample:...")) as routing:     # plain or swapped, whichever comes first
        model.generate(...)
    routing.source                                               # to be said beside the result

A pass of as many tokens as the trace's steps have takes the next step's rows, any other pass the trace's rows from the
first on, round and round. Only the expert ids are replaced; each token's routing weights stay its router's. What a swapped
model's next-layer prediction names is the trace's too, if that has predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from apexk.hf.families import usual_routing
from apexk.hf.inspect import UnsupportedModel, find_experts
from apexk.sim.trace import Trace


@dataclass
class Routing:
    """What is being forced: `source` names the trace, `passes` counts the model's passes so far."""

    trace: Trace
    source: str
    passes: int = 0
    step: int = -1
    rows: np.ndarray | None = None  # of the trace, for the pass that runs

    def begin(self, tokens: int) -> None:
        """A pass over so many tokens begins."""
        per_step = self.trace.tokens // len(np.unique(self.trace.step))
        self.passes += 1
        start = 0
        if tokens == per_step:
            self.step += 1
            start = self.step * per_step
        self.rows = np.arange(start, start + tokens) % self.trace.tokens


@contextmanager
def forced(model: nn.Module, trace: Trace) -> Iterator[Routing]:
    """Replaces the expert ids of every router of `model` until the end of the block.

    Raises ValueError where the trace's experts or top-k are others or its layers fewer, `UnsupportedModel` where a family's
    router does not give ids.
    """
    experts = find_experts(model)
    if experts.family.router is None or experts.family.routing is not usual_routing:
        raise UnsupportedModel(f"the routing of {experts.model_type} cannot be forced: its router does not give expert ids")
    here, there = (experts.experts, experts.topk), (trace.experts, trace.topk)
    if here != there or trace.layers < len(experts.blocks):
        raise ValueError(f"trace {trace.source} is of {trace.layers} layers, {there[0]} experts, top-{there[1]}; the model has {len(experts.blocks)} sparse "
                         f"layers of {here[0]} experts, top-{here[1]}")
    if not trace.tokens:
        raise ValueError(f"trace {trace.source} is empty")
    routing = Routing(trace, trace.source)
    hooks = []
    routers = [experts.router(layer) for layer in range(len(experts.blocks))]
    try:
        for layer, router in enumerate(routers):
            replaced = ForcedForward(routing, layer, router)
            hooks.append(router.register_forward_pre_hook(replaced.called))
            router.forward = replaced
        yield routing
    finally:
        for hook in hooks:
            hook.remove()
        for router in routers:
            vars(router).pop("forward", None)


class ForcedForward:
    """A router's `forward`. The router is called as a module for its own layer, and by `forward` alone for a prediction."""

    def __init__(self, routing: Routing, layer: int, router: nn.Module):
        self._routing, self._layer, self._own = routing, layer, router.forward
        self._called = False

    def called(self, module: nn.Module, arguments: tuple) -> None:
        self._called = True

    def __call__(self, x: torch.Tensor, *arguments):
        logits, weights, ids = self._own(x, *arguments)
        predicts, self._called = not self._called, False
        if self._layer == 0 and not predicts:
            self._routing.begin(ids.shape[0])
        trace, rows = self._routing.trace, self._routing.rows
        named = trace.predicted_experts if predicts else trace.routed_experts
        if named is not None and rows is not None:
            ids = torch.from_numpy(named[rows, self._layer].astype(np.int64)).to(ids)
        return logits, weights, ids
