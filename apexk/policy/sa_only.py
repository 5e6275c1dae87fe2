"""Speculative assignment only: prefetch for the next layer, everything still missing runs on the CPU."""

from __future__ import annotations

from .base import Policy
from .scan import choose
from .types import Plan, RouteView


class SpeculativeOnly(Policy):
    """Never waits for the channel: a prefetch still under way at the routing event is a miss and lands for later steps."""

    name = "sa_only"
    source = "the Apex paper's ablation"
    speculates = True
    fetches = False
    waits_in_flight = False

    def on_route(self, view: RouteView) -> Plan:
        return choose(view, limit=0)
