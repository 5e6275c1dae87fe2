"""A fixed transfer count, as in the paper's Fig. 3(d)."""

from __future__ import annotations

from .arguments import require_bool
from .base import DEFAULTS, Policy
from .scan import at_count, by_load, most_copies
from .types import Plan, PolicyOptions, RouteView


class FixedCount(Policy):
    """Always copies the `p` heaviest missed experts, or all there are slots for. With `keep` false they are given up after the
    layer, so that the residents stay what they were."""

    name = "fixed_p"
    source = "the Apex paper, Fig. 3(d)"
    speculates = False
    fetches = True
    waits_in_flight = False

    def __init__(self, options: PolicyOptions = DEFAULTS, p: int = 4, keep: bool = True):
        if type(p) is not int or p < 0:
            raise ValueError(f"fixed_p: p is {p!r}; wanted a whole number >= 0")
        require_bool("fixed_p", "keep", keep)
        super().__init__(options)
        self.p, self.keeps_fetched, self.waves = p, keep, not keep

    def extra_slots(self, capacity: int) -> int:
        return 0 if self.keeps_fetched else self.p

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        most = most_copies(view, len(missed)) if self.keeps_fetched else len(missed)
        return at_count(view, here, missed, min(self.p, most))
