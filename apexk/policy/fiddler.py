"""Fiddler twice: as the Apex paper describes it (nothing moves), and as its released code decides."""

from __future__ import annotations

from math import inf

from .arguments import require_number
from .base import DEFAULTS, Policy
from .no_assign import NoAssignment
from .scan import by_load
from .types import Plan, PolicyOptions, RouteView

SCRATCH_SLOTS = 4


class FiddlerStatic(NoAssignment):
    """Popular experts stay on the GPU, every missed one runs on the CPU."""

    name = "fiddler_static"
    source = "Fiddler, as the Apex paper runs it"


class FiddlerOriginal(Policy):
    """Copies a missed expert to a scratch slot if its tokens cost the CPU more than the copy, and does not keep it.

    The released code minimises the sum of both devices' costs, with 7 a CPU token and 70 a copy: a threshold of 10 tokens.
    By default the threshold is the cost model's own: one more expert of n tokens on the CPU against one more copy. First
    residents are the most popular experts of all layers together.
    """

    name = "fiddler_original"
    source = "Fiddler, released code"
    speculates = False
    fetches = True
    waits_in_flight = False
    waves = True
    keeps_fetched = False
    pool_scopes = ("global",)

    def __init__(self, options: PolicyOptions = DEFAULTS, threshold: float | None = None):
        if threshold is not None:
            require_number("fiddler_original", "threshold", threshold, 0, inf, "a number of tokens")
        super().__init__(options)
        self.threshold = threshold

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS

    def initial(self, layer: int) -> tuple[int, ...]:
        if self.popularity is None:
            return super().initial(layer)
        places = [(at, e) for at in range(self.shape.layers) for e in range(self.shape.experts)]
        places.sort(key=lambda place: -self.popularity[place[0]][place[1]])
        return tuple([e for at, e in places[: self.capacity * self.shape.layers] if at == layer])

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        costs = view.costs
        copy = costs.copy_ms(2) - costs.copy_ms(1)

        def heavy(load: int) -> bool:
            if self.threshold is not None:
                return load > self.threshold
            return costs.cpu_ms(2, 1 + load) - costs.cpu_ms(1, 1) > copy

        fetch = [e for e in missed if heavy(view.loads[e])]
        return Plan(tuple(here), tuple(fetch), tuple(missed[len(fetch) :]))
