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
        plan = choose(view, limit=0 if view.memory["guarded"] else None)
        if view.memory["held"] is not None and not view.memory["guarded"]:
            plan = min(plan, self._in_waves(view), key=lambda p: _longer(view, p))
        return spill(view, plan) if self.spills else plan

    def _in_waves(self, view: RouteView) -> Plan:
        plan = choose(replace(view, available=len(view.loads)))
        first, held = view.in_flight.expert if view.in_flight else None, self.holds(view)
        # lightest first, but for a copy under way; held ones last: from then on their slots take no part in the waves
        order = sorted(reversed(plan.exact_fetch), key=lambda e: (e != first, e in held))
        return replace(plan, exact_fetch=tuple(order)) if waves(view, plan) else plan

    def holds(self, view: RouteView) -> frozenset[int]:
        ranked = sorted(view.loads, key=lambda e: (-view.loads[e], e))
        return frozenset(ranked[: view.memory["held"]])


def waves(view: RouteView, plan: Plan) -> int:
    """Waves after the first that its copies take; 0 where they fit at once."""
    beyond = plan.transfer_count - view.available - (view.in_flight is not None)
    return max(0, -(-beyond // SCRATCH_SLOTS))


def _longer(view: RouteView, plan: Plan) -> float:
    """The longer path. Each further wave launches once more, and the link waits for it; estimated as a launch's fixed cost."""
    return max(plan.est_cpu_ms, plan.est_gpu_ms + waves(view, plan) * view.costs.gpu_ms(1, 0))
