"""KTransformers: experts placed once, on the CPU or the GPU; a long prefill streams whole layers through the GPU.

Sources: the public `kt-kernel` and its SGLang wrapper (placement strategies, token threshold, update from a batch) and
their tutorial on expert scheduling. Ours where it is silent or differs: a layer is streamed through a few slots instead
of a shadow layer beside the pool, and only the missed experts that have a token are copied (the source copies all of the
layer, then takes what stays resident from there).
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from .base import DEFAULTS, Policy
from .fiddler import SCRATCH_SLOTS
from .scan import by_load
from .types import ModelShape, Phase, Plan, PolicyOptions, RouteView

PLACEMENTS = ("uniform", "frequency", "front", "random")
RANDOM_SEED = 42  # the source's


class KTStatic(Policy):
    """Residents by `placement` in each layer: "uniform" (the lowest ids), "frequency" (most popular), "random"; or over the slots
    of all layers, "front": the first layers have all of their experts there.

    A pass of at least `stream_tokens` tokens (0: none) copies every missed expert and computes nothing on the CPU.

    With `defer` = d > 0, which is lossy, the CPU's experts that are among the d lowest-weight ones of every token that chose them are computed
    while the next layer runs, and their sums are added to that layer's output. An expert that one token has above its d lowest is
    computed at once for all; the last layer defers none.
    """

    name = "kt_static"
    source = "KTransformers, public code"
    speculates = False
    fetches = True
    waits_in_flight = False
    waves = True
    keeps_fetched = False

    def __init__(self, options: PolicyOptions = DEFAULTS, placement: str = "uniform", stream_tokens: int = 0, defer: int = 0):
        if placement not in PLACEMENTS:
            raise ValueError(f"{self.name}: placement is {placement!r}; there are {', '.join(PLACEMENTS)}")
        if type(stream_tokens) is not int or stream_tokens < 0:
            raise ValueError(f"{self.name}: stream_tokens is {stream_tokens!r}; wanted a whole number >= 0")
        if type(defer) is not int or defer < 0:
            raise ValueError(f"{self.name}: defer is {defer!r}; wanted a number of experts a token, at least 0")
        super().__init__(options)
        self.placement, self.stream_tokens, self.defers = placement, stream_tokens, defer
        self.lossless = not defer
        if placement == "front":
            self.pool_scopes = ("global",)

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        if self.defers > shape.topk:
            raise ValueError(f"{self.name}: defer is {self.defers}; a token has {shape.topk} experts")

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS if self.stream_tokens else 0

    def initial(self, layer: int) -> tuple[int, ...]:
        experts = range(self.shape.experts)
        if self.placement == "front":
            return tuple(experts[: max(0, self.capacity * self.shape.layers - layer * self.shape.experts)])
        if self.placement == "random":
            return tuple(random.Random(RANDOM_SEED * 1_000_003 + layer).sample(experts, self.capacity))
        return tuple((self.by_popularity(layer) if self.placement == "frequency" else experts)[: self.capacity])

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        if self.stream_tokens and view.tokens >= self.stream_tokens:
            return Plan(tuple(here), tuple(missed), ())
        return Plan(tuple(here), (), tuple(missed))


class KTDynamic(KTStatic):
    """Each layer of a streamed pass leaves those experts resident that the pass used most.

    The stream goes through a few of the pool's own slots; the lightest re-picked experts give way to it.
    """

    name = "kt_dynamic"
    source = "KTransformers, public code, with dynamic expert update"
    keeps_fetched = True

    def __init__(self, options: PolicyOptions = DEFAULTS, placement: str = "frequency", stream_tokens: int = 512, defer: int = 0):
        super().__init__(options, placement, stream_tokens, defer)

    def extra_slots(self, capacity: int) -> int:
        return max(0, SCRATCH_SLOTS - capacity) if self.stream_tokens else 0

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict | None:
        """The experts that a streamed pass leaves resident; None for any other pass."""
        if not self.stream_tokens or sum(loads.values()) < self.stream_tokens * self.shape.topk:
            return None
        ranked = sorted(loads, key=lambda e: (-loads[e], e))
        return {"held": ranked[: max(0, self.capacity - SCRATCH_SLOTS)]}

    def on_route(self, view: RouteView) -> Plan:
        plan = super().on_route(view)
        # held experts come last: from then on their slots take no part in the stream
        return Plan(plan.gpu_resident, tuple(sorted(reversed(plan.exact_fetch), key=self.holds(view).__contains__)), plan.cpu)

    def holds(self, view: RouteView) -> frozenset[int]:
        return frozenset(view.memory["held"]) if view.memory else frozenset()
