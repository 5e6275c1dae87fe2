"""Apex: copy the heaviest missed experts until both paths balance, prefetch the next layer's by its own router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .base import DEFAULTS, Policy
from .guard import Guard
from .scan import choose, spill
from .types import Observation, Phase, Plan, PolicyOptions, Prediction, RouteView


class Apex(Policy):
    """Exact and speculative copies together, with the affine cost model and residents first unless told otherwise.

    Beside the paper: victims are chosen by `LearntUtility`, a layer whose copying plans measure slower than none stops
    copying (`guard`), and residents whose kernel would be the longer path are left to the CPU (`spills`).
    """

    name = "apex"
    source = "the Apex paper; cost model ours"
    speculates = True
    fetches = True
    waits_in_flight = True
    evicts = "learnt"
    phase: Phase = "decode"  # of the newest layer

    def __init__(self, options: PolicyOptions = DEFAULTS, guard: bool = True, spills: bool = True):
        super().__init__(options)
        self.spills = bool(spills)
        # rates fitted to what was left to the CPU say too little about no copy at all: the guard would judge by a wrong line
        self.guard = Guard() if guard and options.cost == "affine" else None

    @property
    def guarded_layers(self) -> int:
        """Layer-steps that ran without copies because measured plans had lost."""
        return self.guard.guarded if self.guard else 0

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict | None:
        return {"guarded": True} if self.guard and self.guard.resting(phase, layer) else None

    def on_route(self, view: RouteView) -> Plan:
        plan = choose(view, limit=0 if view.memory and view.memory["guarded"] else None)
        return spill(view, plan) if self.spills else plan

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        if self.guard and self.guard.resting(self.phase, layer_next):
            return ()
        return super().on_predict(layer_next, prediction, resident)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        self.phase = phase
        if self.guard:
            self.guard.layer_done(phase, layer)

    def observe(self, phase: Phase, seen: Observation) -> None:
        super().observe(phase, seen)
        if self.guard:
            self.guard.observe(phase, seen)


class ApexPaper(Apex):
    """Apex read literally: rates instead of affine costs, and residents wait for the copies."""

    name = "apex_paper"
    source = "the Apex paper, literal reading"
    resident_first = False
    evicts = "utility"

    def __init__(self, options: PolicyOptions = DEFAULTS):
        super().__init__(replace(options, cost="rates"), guard=False, spills=False)

    def on_route(self, view: RouteView) -> Plan:
        return choose(replace(view, resident_first=False))
