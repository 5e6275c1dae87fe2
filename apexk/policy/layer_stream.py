"""FlexGen and MoE-Lightning: weights stream through the GPU, layer by layer, in fixed order; no expert runs on the CPU.

Both are made for large batches, where every expert of a layer has tokens and the whole layer is moved; here an expert
without a token is not. What the systems decide beside that, batch sizes and what lies where, their planners do
(`apexk.planners`).
"""

from __future__ import annotations

from .base import Policy
from .fiddler import SCRATCH_SLOTS
from .types import Plan, RouteView


class FlexGen(Policy):
    """The lowest ids of each layer stay on the GPU, as many as there are slots; the rest is copied in order of id, through a
    few slots, and not kept."""

    name = "flexgen"
    source = "FlexGen, public code; experts without a token stay where they are"
    speculates = False
    fetches = True
    waits_in_flight = False
    uses_cpu = False
    waves = True
    keeps_fetched = False

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS

    def initial(self, layer: int) -> tuple[int, ...]:
        return tuple(range(self.capacity))

    def on_route(self, view: RouteView) -> Plan:
        ids = sorted(view.loads)
        return Plan(tuple(e for e in ids if e in view.resident), tuple(e for e in ids if e not in view.resident), ())
