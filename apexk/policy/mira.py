"""Mira: two regions of slots in each layer, one for experts that stay hot, one through which predicted ones pass.

Published as an abstract only; the rules and numbers are ours. Its compressed transfers are a setting of the run
(`payload`), not of the policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from .arguments import require_number
from .base import DEFAULTS, Policy
from .mixtral_offloading import STAGING_SLOTS
from .predictor import active, read
from .scan import by_load, choose
from .types import ModelShape, Phase, Plan, PolicyOptions, Prediction, RouteView


class Mira(Policy):
    """`hot` of a layer's slots hold its most useful experts, the rest (STAGE) what is predicted or missed.

    The two following layers' routers, on this layer's input, name what comes: experts with the largest score sums, as many as
    STAGE has slots, are copied into it, the nearer layer's first since they are due first. With `predictor` (a file that
    `apexk train-predictor` wrote) the farther layer's most likely experts are named by that instead, from this layer's loads, past
    steps and that layer's router, as many as are expected to be active; the nearer layer keeps its router. A miss is copied on demand (the
    GPU runs everything); with `miss="cpu"` the CPU computes it, and copies come from predictions and promotions alone.
    STAGE replaces the expert that came longest ago and is not predicted. Only copies on demand for which STAGE has no slot left
    replace an expert of HOT, the least useful one.

    Every `every` steps an expert outside of HOT takes the place of the least useful inside where its utility is above
    `margin` times that one's, until none is; who is displaced has just come to STAGE. Experts of HOT that are not there are copied.
    """

    name = "mira"
    source = "Mira, abstract; regions, numbers and the router as predictor ours"
    speculates = True
    fetches = True
    waits_in_flight = True
    look_ahead = 2
    uses_cpu = False
    waves = True
    posts = True
    pool_scopes = ("layer",)

    def __init__(self, options: PolicyOptions = DEFAULTS, hot: float = 0.7, every: int = 16, margin: float = 1.2, miss: str = "fetch",
                 predictor: str | None = None):
        for what, value, low, high in (("hot", hot, 0.0, 1.0), ("margin", margin, 1.0, 1e6)):
            require_number("mira", what, value, low, high)
        if type(every) is not int or every < 1:
            raise ValueError(f"mira: every is {every!r}; wanted a number of steps, at least 1")
        if miss not in ("fetch", "cpu"):
            raise ValueError(f"mira: miss is {miss!r}; there are 'fetch' and 'cpu'")
        if options.evict not in (None, "utility", "learnt"):
            raise ValueError(f"mira: evict is {options.evict!r}; its regions need utilities: 'utility' or 'learnt'")
        super().__init__(options)
        self.share, self.every, self.margin = hot, every, margin
        self.predictor = None if predictor is None else read(predictor, "linear")
        self.asked, self.came = 0, defaultdict(dict)  # by layer: when each expert was last asked for
        if miss == "cpu":
            self.fetches = self.waits_in_flight = self.waves = False
            self.uses_cpu = True

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        if self.predictor is not None:
            self.predictor.require(shape)
            self.predictor.reset(shape.topk)
        self.now: tuple[int, int, Mapping[int, int]] = 0, 0, {}  # newest routing event: layer, tokens, loads
        size = int(self.share * self.capacity)
        self.stage_slots = self.capacity + self.extra_slots(self.capacity) - size
        self.hot = [set(self.initial(layer)[:size]) for layer in range(shape.layers)]
        self.asked = 0
        self.came.clear()
        self.predicted: list[set[int]] = [set() for _ in range(shape.layers)]  # for the layer's next routing event

    def extra_slots(self, capacity: int) -> int:
        return max(0, STAGING_SLOTS - capacity) if self.fetches else 0

    def on_route(self, view: RouteView) -> Plan:
        self.now = view.layer, view.tokens, view.loads
        if not self.fetches:
            return choose(view, limit=0)
        here, missed = by_load(view)
        self._ask(view.layer, missed)
        return Plan(tuple(here), tuple(missed), ())

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        coming, scores = {e for e, load in prediction.loads.items() if load > 0}, prediction.scores
        layer, tokens, loads = self.now
        if self.predictor is not None and layer_next == layer + self.predictor.distance:
            chances = self.predictor.chances(layer_next, tokens, prediction.loads, loads)
            likely = (-chances).argsort(kind="stable")[: round(active(chances, tokens))].tolist()
            coming, scores = set(likely), {e: float(chances[e]) for e in likely}
        self.predicted[layer_next] |= coming
        queue = sorted(coming - resident, key=lambda e: (-scores.get(e, 0.0), e))[: self.stage_slots]
        self._ask(layer_next, queue)
        return tuple(queue)

    def victims(self, layer: int, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        staged = self._staged(layer, candidates)
        rest = super().victims(layer, self.hot[layer].intersection(candidates), count - len(staged), step) if count > len(staged) else ()
        return (*staged[:count], *rest)

    def victims_for(self, layer: int, incoming: Sequence[int], candidates: Collection[int], step: int) -> tuple[int, ...]:
        return tuple(self._staged(layer, set(candidates) - self.predicted[layer])[: len(incoming)])

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        self.predicted[layer].clear()
        if self.predictor is not None:
            self.predictor.learn(layer, loads)

    def on_step_done(self, step: int) -> tuple[tuple[int, int], ...]:
        if (step + 1) % self.every:
            return ()
        return tuple((layer, expert) for layer in range(self.shape.layers) for expert in self._promote(layer, step))

    def _promote(self, layer: int, step: int) -> list[int]:
        """Renews a layer's HOT region; returns its experts, most useful first."""
        hot = self.hot[layer]
        useful = [self._utility[layer].read(e, step) for e in range(self.shape.experts)]
        outside = sorted(set(range(self.shape.experts)) - hot, key=lambda e: (-useful[e], e))
        for new, old in zip(outside, sorted(hot, key=lambda e: (useful[e], -e)), strict=False):
            if useful[new] <= self.margin * useful[old]:
                break
            hot.remove(old)
            hot.add(new)
            self._ask(layer, [old])
        return sorted(hot, key=lambda e: (-useful[e], e))

    def _staged(self, layer: int, candidates: Collection[int]) -> list[int]:
        """Candidates in STAGE, the one that came longest ago first."""
        came = self.came[layer]
        return sorted(set(candidates) - self.hot[layer], key=lambda e: (came.get(e, 0), e))

    def _ask(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.asked += 1
            self.came[layer][expert] = self.asked
