"""Batch thresholds of llama.cpp and ik_llama.cpp: a large batch copies what it needs, a small one computes on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Policy
from .fiddler import SCRATCH_SLOTS
from .scan import by_load
from .types import Phase, Plan, RouteView

MIN_BATCH = 32


class LlamaCpp(Policy):
    """From 32 tokens on every missed expert is copied, through scratch slots, and not kept."""

    name = "llamacpp_static32"
    source = "llama.cpp, operator offload"
    speculates = False
    fetches = True
    waits_in_flight = False
    waves = True
    keeps_fetched = False

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS

    def copies(self, view: RouteView) -> bool:
        return view.tokens >= MIN_BATCH

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        if self.copies(view):
            return Plan(tuple(here), tuple(missed), ())
        return Plan(tuple(here), (), tuple(missed))


class IkLlamaCpp(LlamaCpp):
    """The same from 32 tokens an expert on: tokens * top-k >= 32 * experts."""

    name = "ik_static"
    source = "ik_llama.cpp, operator offload by ratio"

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict:
        return {"experts": self.shape.experts, "topk": self.shape.topk}

    def copies(self, view: RouteView) -> bool:
        return view.tokens * view.memory["topk"] >= MIN_BATCH * view.memory["experts"]
