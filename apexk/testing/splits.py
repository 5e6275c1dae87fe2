"""A policy for tests of plans that split experts: Apex's choice, with every expert that can be split between GPU and CPU."""

from __future__ import annotations

from dataclasses import replace

from apexk.policy.apex import Apex
from apexk.policy.base import DEFAULTS
from apexk.policy.types import Plan, PolicyOptions, RouteView


class SplitAll(Apex):
    """`apexk.testing.splits:SplitAll`. The GPU's part of an expert is 1 to all but one of its pairs, another one every step."""

    name = "split_all"
    source = "tests"

    def __init__(self, options: PolicyOptions = DEFAULTS):
        super().__init__(options, waves=False)

    def on_route(self, view: RouteView) -> Plan:
        plan, loads = super().on_route(view), view.loads
        split = [(e, 1 + (e + view.step) % (loads[e] - 1)) for e in (*plan.gpu_resident, *plan.exact_fetch) if loads[e] > 1]
        return replace(plan, split=tuple(split))
