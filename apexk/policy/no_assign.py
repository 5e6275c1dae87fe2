"""No assignment: the initial residents stay, every missed expert runs on the CPU. The way of Fiddler in the paper."""

from __future__ import annotations

from .base import Policy
from .scan import choose
from .types import Plan, RouteView


class NoAssignment(Policy):
    """Moves no expert at all."""

    name = "no_assign"
    source = "the Apex paper's ablation"
    speculates = False
    fetches = False
    waits_in_flight = False

    def on_route(self, view: RouteView) -> Plan:
        return choose(view, limit=0)
