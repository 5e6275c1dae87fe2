"""HybriMoE: deal residents and misses out to the side that is done first; prefetch what shortens the next layer most."""

from __future__ import annotations

from collections.abc import Mapping

from .base import DEFAULTS, Policy
from .greedy import Deal
from .ranker import speculative_order
from .scan import by_load
from .types import Costs, Phase, Plan, PolicyOptions, Prediction, RouteView


class HybriMoE(Policy):
    """The GPU takes from the heavy end (residents first), the CPU from the light end, and may take a resident.

    Costs are the affine model's; the released constants were marked as untested. `prefetch` is "impact" (the paper: the
    expert whose presence shortens its layer's schedule most) or a count of best-scored absent experts (the code, 0 by
    default). `look_ahead` is 1 to 3 layers: by default the paper's 3, or with a count the code's 1. Scores are token shares,
    since a batch's mean router scores do not reach a policy.
    """

    name = "hybrimoe"
    source = "HybriMoE, paper and released code"
    speculates = True
    fetches = True
    waits_in_flight = True
    look_ahead = 3
    evicts = "score"

    def __init__(self, options: PolicyOptions = DEFAULTS, prefetch: str | int = "impact", look_ahead: int | None = None):
        if prefetch != "impact" and (type(prefetch) is not int or prefetch < 0):
            raise ValueError(f"hybrimoe: prefetch is {prefetch!r}; wanted 'impact' or a whole number >= 0")
        if look_ahead is not None and (type(look_ahead) is not int or not 1 <= look_ahead <= 3):
            raise ValueError(f"hybrimoe: look_ahead is {look_ahead!r}; wanted 1, 2 or 3 layers")
        super().__init__(options)
        self.prefetch, self.look_ahead = prefetch, look_ahead or (3 if prefetch == "impact" else 1)
        self.phase: Phase = "decode"

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        flying = view.in_flight.expert if view.in_flight else None
        return schedule(view.loads, here, missed, view.costs, view.channel_wait_ms, view.available, flying)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        self.phase = phase

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        absent = speculative_order(prediction, resident)
        if self.prefetch != "impact":
            return absent[: self.prefetch]
        costs, loads = self.costs(self.phase), {e: n for e, n in prediction.loads.items() if n > 0}
        order = sorted(loads, key=lambda e: (-loads[e], e))
        queue: list[int] = []
        here, absent = [e for e in order if e in resident], list(absent)
        now = schedule(loads, here, absent, costs, 0.0, len(absent))
        while absent and now.exact_fetch + now.cpu:
            best = absent[0]  # with one more resident the heaviest absent expert gains most: equal costs but for its load
            here, absent = sorted([*here, best], key=lambda e: (-loads[e], e)), absent[1:]
            after = schedule(loads, here, absent, costs, 0.0, len(absent))
            if _end(after) >= _end(now):
                break
            queue.append(best)
            now = after
        return tuple(queue)


def schedule(loads: Mapping[int, int], here: list[int], missed: list[int], costs: Costs, wait: float, slots: int, flying: int | None = None) -> Plan:
    """The greedy deal of the released code, with at most `slots` copies beside the one that is on its way (`flying`)."""
    deal, order = Deal(costs, wait), here + missed
    resident: list[int] = []
    fetch: list[int] = []
    cpu: list[int] = []
    here_set, new = set(here), 0
    first, last = 0, len(order) - 1
    while first <= last:
        front, back = order[first], order[last]
        copied = front not in here_set
        room = not copied or front == flying or new < slots
        if room and deal.gpu_with(loads[front], copied) <= deal.cpu_with(loads[back]):
            deal.to_gpu(loads[front], copied)
            (fetch if copied else resident).append(front)
            new += copied and front != flying
            first += 1
        else:
            deal.to_cpu(loads[back])
            cpu.append(back)
            last -= 1
    return deal.plan(resident, fetch, cpu)


def _end(plan: Plan) -> float:
    return max(plan.est_cpu_ms, plan.est_gpu_ms)
