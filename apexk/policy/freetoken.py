"""FreeToken's q: fetch the share of the misses that makes the link and the CPU end together."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Policy
from .scan import by_load, most_copies
from .types import Phase, Plan, RouteView


class FreeTokenQ(Policy):
    """Of m misses F = q*m are fetched, q = link rate / (link rate + CPU rate), rounded to the side whose longer path is shorter.

    The most recently active misses are fetched, the rest runs on the CPU. LRU slots, one pool over
    all layers. A prefill fetches every miss, in waves through the slots.
    """

    name = "freetoken_q"
    source = "FreeToken, released code"
    speculates = False
    fetches = True
    waits_in_flight = False
    waves = True
    evicts = "lru"
    pool_scopes = ("global", "layer")

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict:
        active = self._utility[layer].active
        return {"last_active": [[e, active[e]] for e in loads]}

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        most = most_copies(view, len(missed))
        if view.phase == "prefill" and most:
            return Plan(tuple(here), tuple(missed), ())
        last = dict(view.memory["last_active"])
        order = sorted(missed, key=lambda e: (-last[e], -view.loads[e], e))
        count = self._share(view, order, most)
        fetch = order[:count]
        chosen = set(fetch)
        return Plan(tuple(here), tuple(fetch), tuple(e for e in missed if e not in chosen))

    def _share(self, view: RouteView, order: list[int], most: int) -> int:
        m, pairs, costs = len(order), sum(view.loads[e] for e in order), view.costs
        if not m:
            return 0
        copy, cpu = costs.copy_ms(m), costs.cpu_ms(m, pairs)
        low = int(m * cpu / (copy + cpu)) if copy + cpu else 0

        def longer(count: int) -> float:
            rest = sum(view.loads[e] for e in order[count:])
            return max(view.channel_wait_ms + costs.copy_ms(count) if count else 0.0, costs.cpu_ms(m - count, rest))

        return min((count for count in (low, low + 1) if count <= most), key=longer, default=most)
