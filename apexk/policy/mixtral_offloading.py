"""Mixtral-Offloading: the GPU runs everything, missed experts are fetched on demand, the next layer's guessed ones ahead."""

from __future__ import annotations

from .base import DEFAULTS, Policy
from .scan import by_load
from .types import Plan, PolicyOptions, Prediction, RouteView

STAGING_SLOTS = 4


class MixtralOffloading(Policy):
    """An LRU cache of experts in each layer. The speculation that its text describes and its public code lacks is included.

    `k` caps the experts that are prefetched; None takes every expert that the prediction names.
    """

    name = "mixtral_offloading"
    source = "Mixtral-Offloading, text and released code"
    speculates = True
    fetches = True
    waits_in_flight = True
    uses_cpu = False
    waves = True
    evicts = "lru"

    def __init__(self, options: PolicyOptions = DEFAULTS, k: int | None = None):
        if k is not None and (type(k) is not int or k < 0):
            raise ValueError(f"mixtral_offloading: k is {k!r}; wanted a whole number >= 0")
        super().__init__(options)
        self.k = k

    def extra_slots(self, capacity: int) -> int:
        return max(0, STAGING_SLOTS - capacity)

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        return Plan(tuple(here), tuple(missed), ())

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        return super().on_predict(layer_next, prediction, resident)[: self.k]
