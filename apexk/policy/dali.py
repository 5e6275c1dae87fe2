"""DALI: greedy 0-1 assignment by load, predictions corrected by their own past error, load-aware replacement."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Policy
from .greedy import Deal
from .scan import by_load
from .types import ModelShape, Phase, Plan, Prediction, RouteView

ERROR_WEIGHT = 0.2  # of the newest step's error; a choice of ours, the abstract gives none


class Dali(Policy):
    """Experts by falling load, each to the side that would be done with it first. Rebuilt from the abstract."""

    name = "dali"
    source = "DALI, abstract; details ours"
    speculates = True
    fetches = True
    waits_in_flight = True

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        self.error: list[dict[int, float]] = [{} for _ in range(shape.layers)]
        self.guessed: dict[int, Mapping[int, int]] = {}

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        loads, absent = view.loads, set(missed)
        deal, flying = Deal(view.costs, view.channel_wait_ms), view.in_flight.expert if view.in_flight else None
        resident: list[int] = []
        fetch: list[int] = []
        cpu: list[int] = []
        new = 0
        for expert in sorted(loads, key=lambda e: (-loads[e], e)):
            copied = expert in absent
            room = not copied or expert == flying or new < view.available
            if room and deal.gpu_with(loads[expert], copied) <= deal.cpu_with(loads[expert]):
                deal.to_gpu(loads[expert], copied)
                (fetch if copied else resident).append(expert)
                new += copied and expert != flying
            else:
                deal.to_cpu(loads[expert])
                cpu.append(expert)
        return deal.plan(resident, fetch, cpu)

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        self.guessed[layer_next] = prediction.loads
        error = self.error[layer_next]
        corrected = {e: n + error.get(e, 0.0) for e, n in prediction.loads.items()}
        for expert, more in error.items():
            if expert not in corrected and more >= 1.0:
                corrected[expert] = more
        absent = [e for e, n in corrected.items() if e not in resident and n >= 0.5]
        return tuple(sorted(absent, key=lambda e: (-corrected[e], -prediction.scores.get(e, 0.0), e)))

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        guess = self.guessed.pop(layer, None)
        if guess is None:
            return
        error = self.error[layer]
        for expert in {*error, *loads, *guess}:
            new = (1 - ERROR_WEIGHT) * error.get(expert, 0.0) + ERROR_WEIGHT * (loads.get(expert, 0) - guess.get(expert, 0))
            if abs(new) > 0.01:
                error[expert] = new
            else:
                error.pop(expert, None)
