"""Exact assignment only: Apex's transfer count without prediction."""

from __future__ import annotations

from .base import Policy
from .scan import choose
from .types import Plan, RouteView


class ExactOnly(Policy):
    """Copies the missed experts that balance both paths; nothing is prefetched."""

    name = "ea_only"
    source = "the Apex paper's ablation"
    speculates = False
    fetches = True
    waits_in_flight = False

    def on_route(self, view: RouteView) -> Plan:
        return choose(view)
