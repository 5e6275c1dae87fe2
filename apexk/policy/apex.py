"""Apex: copy the heaviest missed experts until both paths balance, prefetch the next layer's by its own router."""

from __future__ import annotations

from dataclasses import replace

from .base import DEFAULTS, Policy
from .scan import choose
from .types import Plan, PolicyOptions, RouteView


class Apex(Policy):
    """Exact and speculative copies together, with the affine cost model and residents first unless told otherwise."""

    name = "apex"
    source = "the Apex paper; cost model ours"
    speculates = True
    fetches = True
    waits_in_flight = True

    def on_route(self, view: RouteView) -> Plan:
        return choose(view)


class ApexPaper(Apex):
    """Apex read literally: rates instead of affine costs, and residents wait for the copies."""

    name = "apex_paper"
    source = "the Apex paper, literal reading"
    resident_first = False

    def __init__(self, options: PolicyOptions = DEFAULTS):
        super().__init__(replace(options, cost="rates"))

    def on_route(self, view: RouteView) -> Plan:
        return choose(replace(view, resident_first=False))
