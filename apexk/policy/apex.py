"""Apex: copy the heaviest missed experts until both paths balance, prefetch the next layer's by its own router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .arguments import require_bool
from .base import DEFAULTS, Policy
from .fiddler import SCRATCH_SLOTS
from .guard import Guard
from .native.scan import decide
from .scan import choose, choose_ref, most_copies, spill, unlimited
from .types import Observation, Phase, Plan, PolicyOptions, Prediction, RouteView

#: waves take the link from the prefetches and evict residents, which the estimate of one layer does not see: they must shorten it by more
WAVES_GAIN = 0.1


class Apex(Policy):
    """Exact and speculative copies together, with the affine cost model and residents first unless told otherwise.

    Beside the paper: victims are chosen by `LearntUtility`, a layer whose copying plans measure slower than none stops
    copying (`guard`), residents whose kernel would be the longer path are left to the CPU (`spills`), and copies that do not
    fit at once go through a few slots in waves (`waves`): a long prefill uses nearly all residents, so that no slot is left to
    copy into. The experts that such a pass used most end up resident.
    """

    name = "apex"
    source = "the Apex paper; cost model ours"
    speculates = True
    fetches = True
    waits_in_flight = True
    evicts = "learnt"
    phase: Phase = "decode"  # of the newest layer

    def __init__(self, options: PolicyOptions = DEFAULTS, guard: bool = True, spills: bool = True, waves: bool = True):
        for what, value in (("guard", guard), ("spills", spills), ("waves", waves)):
            require_bool("apex", what, value)
        super().__init__(options)
        self.spills, self.waves = spills, waves
        # rates fitted to what was left to the CPU say too little about no copy at all: the guard would judge by a wrong line
        self.guard = Guard() if guard and options.cost == "affine" else None

    @property
    def guarded_layers(self) -> int:
        """Layer-steps that ran without copies because measured plans had lost."""
        return self.guard.guarded if self.guard else 0

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict | None:
        if self.guard and self.guard.resting(phase, layer):
            return {"guarded": True}
        return {"slots": self.capacity} if self.waves and self.capacity else None

    def on_route(self, view: RouteView) -> Plan:
        memory = view.memory or {}
        limit = 0 if "guarded" in memory else None
        if any(getattr(type(self), name) is not getattr(Apex, name) for name in ("in_waves", "holds")):  # the native code has Apex's own
            return self.on_route_ref(view, limit)
        plan = decide(view, limit, slots=memory.get("slots", 0), scratch=SCRATCH_SLOTS, gain=WAVES_GAIN, spills=self.spills)
        return plan or self.on_route_ref(view, limit)

    def on_route_ref(self, view: RouteView, limit: int | None) -> Plan:
        """The same in Python, and with the `in_waves` and `holds` of a policy that has its own."""
        plan = self.in_waves(view, choose_ref(view, limit))
        return spill(view, plan) if self.spills else plan

    def in_waves(self, view: RouteView, plan: Plan) -> Plan:
        """`plan`, or one with more copies than fit at once where that shortens the longer path by `WAVES_GAIN`."""
        missed = plan.transfer_count + len(plan.cpu)
        fit = most_copies(view, missed)
        limited = fit < missed and len(plan.estimates) > fit  # the slots end the search
        slots = (view.memory or {}).get("slots", 0)
        if not limited or not slots:
            return plan
        more = unlimited(view, plan)
        beyond = more.transfer_count - fit
        if beyond <= 0:
            return plan
        # each wave launches once more, and the link waits for it: estimated as a launch's fixed cost
        launches = -(-beyond // min(SCRATCH_SLOTS, slots)) * view.costs.gpu_ms(1, 0)
        if max(more.est_cpu_ms, more.est_gpu_ms + launches) >= (1 - WAVES_GAIN) * max(plan.est_cpu_ms, plan.est_gpu_ms):
            return plan
        # a copy under way leads, then the lightest first; held ones last: from then on their slots take no part in the waves
        led, held = 0 if view.in_flight is None else 1, self.holds(view)
        rest = more.exact_fetch[led:][::-1]
        order = (*more.exact_fetch[:led], *[e for e in rest if e not in held], *[e for e in rest if e in held])
        return replace(more, exact_fetch=order, est_gpu_ms=more.est_gpu_ms + launches)

    def holds(self, view: RouteView) -> frozenset[int]:
        """All but a few slots are for the heaviest experts of the pass."""
        slots = (view.memory or {}).get("slots", 0)
        ranked = sorted(sorted(view.loads), key=view.loads.__getitem__, reverse=True)  # stable: equal loads by id
        return frozenset(ranked[: max(0, slots - SCRATCH_SLOTS)])

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        if self.guard and self.guard.resting(self.phase, layer_next):
            return ()
        return super().on_predict(layer_next, prediction, resident)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        self.phase = phase
        if self.guard:
            self.guard.layer_done(phase, layer)

    def observe(self, phase: Phase, seen: Observation) -> None:
        super().observe(phase, seen)
        if self.guard:
            self.guard.observe(phase, seen)


class ApexPaper(Apex):
    """Apex read literally: rates instead of affine costs, and residents wait for the copies."""

    name = "apex_paper"
    source = "the Apex paper, literal reading"
    resident_first = False
    evicts = "utility"

    def __init__(self, options: PolicyOptions = DEFAULTS):
        super().__init__(replace(options, cost="rates"), guard=False, spills=False, waves=False)

    def on_route(self, view: RouteView) -> Plan:
        return choose(replace(view, resident_first=False))
