"""Apex whose long passes stream: where nearly every resident is in use, copies go through a few slots, in waves.

Apex copies into slots that the layer does not use. A long prefill uses nearly all of them, so that nearly no copy is
left to it and the CPU computes every miss. Here the count is found as if there were slots for all, and what does not fit
at once runs in waves; the experts that the pass used most keep their slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .apex import Apex
from .fiddler import SCRATCH_SLOTS
from .scan import choose, spill
from .types import Phase, Plan, RouteView


class ApexStream(Apex):
    """Apex in passes whose copies fit; in others the heaviest experts of the pass end up resident, as in KTransformers' update."""

    name = "apex_stream"
    source = "ours: Apex with waves"
    waves = True

    def extra_slots(self, capacity: int) -> int:
        return max(0, SCRATCH_SLOTS - capacity) if capacity else 0

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict:
        held = max(0, self.capacity - SCRATCH_SLOTS) if self.capacity else None
        return {"guarded": super().recall(layer, phase, loads) is not None, "held": held}

    def on_route(self, view: RouteView) -> Plan:
        memory = view.memory
        slots = view.available if memory["held"] is None else len(view.loads)
        plan = choose(replace(view, available=slots), limit=0 if memory["guarded"] else None)
        first = view.in_flight.expert if view.in_flight else None
        if plan.transfer_count > view.available + (first is not None):
            held = self.holds(view)
            # lightest first, but for a copy under way; held ones last: from then on their slots take no part in the waves
            order = sorted(reversed(plan.exact_fetch), key=lambda e: (e != first, e in held))
            plan = replace(plan, exact_fetch=tuple(order))
        return spill(view, plan) if self.spills else plan

    def holds(self, view: RouteView) -> frozenset[int]:
        ranked = sorted(view.loads, key=lambda e: (-view.loads[e], e))
        return frozenset(ranked[: view.memory["held"]])
