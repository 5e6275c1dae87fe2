"""Replication: experts that will be overloaded get a second place, on the GPU, for as long as they stay so.

Every expert has a replica on the CPU already, since all weights stay in host memory; on one GPU the useful second one is
a slot. The idea is published for several GPUs (abstract only), where a replica takes a share of an expert's tokens and
the method loses quality; here no token is dropped. The heaviest overloaded expert of a plan is split between its two places
at the balance point (`scan.split`) where the model says that this shortens the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .arguments import require_bool, require_number
from .base import DEFAULTS, Policy
from .predictor import above, read
from .scan import choose, split
from .types import ModelShape, Phase, Plan, PolicyOptions, Prediction, RouteView

IDLE_STEPS = 4  # a replica gives its slot up after as many steps below half of the threshold


class Replication(Policy):
    """Popular experts stay; a `spare` share of the slots is for replicas of overloaded experts.

    Overloaded: more than `theta` times the mean load of a layer's active experts. What the next layer will see is half its
    last load, half its router's prediction (`predictor="mix"`), or what a recurrent predictor expects (a file that `apexk train-predictor
    --kind recurrent` wrote); a replica is copied ahead, or at once where that shortens the longer path. `split`: an overloaded expert
    with a slot may leave some of its pairs to the CPU. On several GPUs (`apexk simulate --set gpus=4`) a `further` share of each one's slots, or
    those that are left once every expert has one ("rest"), is for copies of overloaded experts that another GPU holds.
    """

    name = "replication"
    source = "dynamic expert replication, abstract; on one GPU ours"
    speculates = True
    pool_scopes = ("layer",)
    fetches = True
    waits_in_flight = True

    def __init__(self, options: PolicyOptions = DEFAULTS, theta: float = 2.0, spare: float = 0.25, predictor: str = "mix",
                 split: bool = True, further: float | str = "rest"):
        for what, value, low, high in (("theta", theta, 1.0, 1e6), ("spare", spare, 0.0, 1.0), ("further", 0 if further == "rest" else further, 0.0, 1.0)):
            require_number("replication", what, value, low, high)
        require_bool("replication", "split", split)
        super().__init__(options)
        self.theta, self.spare, self.split, self.further = theta, spare, split, further
        self.predictor = None if predictor == "mix" else read(predictor, "recurrent")

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        if self.predictor is not None:
            self.predictor.require(shape)
            self.predictor.reset(shape.topk)
        self.tokens = 0  # of the newest routing event
        self.last: list[Mapping[int, int]] = [{} for _ in range(shape.layers)]
        self.below: list[dict[int, int]] = [{} for _ in range(shape.layers)]  # by layer: steps that an expert has been below, all in a row
        self.stay = [frozenset(self.initial(layer)) for layer in range(shape.layers)]

    @property
    def replicas(self) -> int:
        """Slots a layer for them, no more than there would be experts without a slot."""
        return min(round(self.spare * self.capacity), self.shape.experts - self.capacity)

    def further_slots(self, shape: ModelShape, pool: int, gpus: int) -> int:
        return max(0, pool - -(-shape.experts // gpus)) if self.further == "rest" else round(self.further * pool)

    def initial(self, layer: int) -> tuple[int, ...]:
        return super().initial(layer)[: self.capacity - self.replicas]

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict:
        return {"idle": sorted(self._idle(layer)), "theta": self.theta, "split": self.split}

    def on_route(self, view: RouteView) -> Plan:
        self.tokens = view.tokens
        heavy = overloaded(view.loads, view.memory["theta"])
        unused = view.resident - view.loads.keys()
        free = view.available - len(unused)
        slots = free + len(unused.intersection(view.memory["idle"]))
        flying = view.in_flight is not None
        seen, limit = replace(view, available=slots), sum(e not in view.resident for e in heavy) + flying
        plan = choose(seen, limit)
        return split(seen, plan, heavy, limit) if heavy and view.memory["split"] else plan

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        if self.predictor is not None:
            chances = self.predictor.chances(layer_next, self.tokens, prediction.loads)
            heavy = above(chances, self.tokens, self.theta)
        else:
            heavy = overloaded(self._mix(layer_next, prediction), self.theta)
        return tuple(e for e in heavy if e not in resident)[: self.replicas]

    def replicate(self, layer: int, prediction: Prediction, copies: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Those whose share on each GPU that holds them would still be overloaded; by the mix, whatever the predictor."""
        expected, below = self._mix(layer, prediction), self.below[layer]
        limit = self.theta * mean(expected)
        wanted = [e for e in overloaded(expected, self.theta) if expected[e] > limit * (1 + copies.get(e, 0))]
        return wanted, [e for e in sorted(copies) if below.get(e, 0) >= IDLE_STEPS]

    def _mix(self, layer: int, prediction: Prediction) -> dict[int, float]:
        last = self.last[layer]
        return {e: 0.5 * last.get(e, 0) + 0.5 * prediction.loads.get(e, 0) for e in {*last, *prediction.loads}}

    def victims(self, layer: int, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        """Idle replicas first; residents that stay last."""
        idle, stay = self._idle(layer), self.stay[layer]
        ranked = super().victims(layer, candidates, len(candidates), step)
        return tuple(sorted(ranked, key=lambda e: (e in stay, e not in idle)))[:count]

    def victims_for(self, layer: int, incoming: Sequence[int], candidates: Collection[int], step: int) -> tuple[int, ...]:
        return self.victims(layer, self._idle(layer).intersection(candidates), len(incoming), step)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        busy = {e for e, load in loads.items() if load >= 0.5 * self.theta * mean(loads)}
        self.below[layer] = {e: 0 if e in busy else self.below[layer].get(e, 0) + 1 for e in range(self.shape.experts)}
        self.last[layer] = loads
        if self.predictor is not None:
            self.predictor.learn(layer, loads)

    def _idle(self, layer: int) -> frozenset[int]:
        return frozenset(e for e, steps in self.below[layer].items() if steps >= IDLE_STEPS and e not in self.stay[layer])


def mean(loads: Mapping[int, float]) -> float:
    """Of the experts with a token."""
    active = [load for load in loads.values() if load > 0]
    return sum(active) / len(active) if active else 0.0


def overloaded(loads: Mapping[int, float], theta: float) -> list[int]:
    """Experts above `theta` times the mean, heaviest first, ties by lower id."""
    limit = theta * mean(loads)
    return sorted((e for e, load in loads.items() if load > limit), key=lambda e: (-loads[e], e))
