"""`Policy`: decides where each active expert runs, what is copied and what is evicted, from integers and rates alone.

A run calls `start` once; then per layer `on_route`, `on_predict` for the next layer, `victims` as slots are needed,
`on_layer_done`, and `observe` once the times are known; after the last layer `on_step_done`. A new policy sets the
flags below and writes `on_route`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from .cost_affine import AffineModel
from .cost_rates import RateModel
from .evict import RULES, Belady
from .ranker import speculative_order
from .types import CostPrior, Costs, ModelShape, Observation, Phase, Plan, PolicyOptions, Prediction, RouteView

DEFAULTS = PolicyOptions()
SCOPES = ("layer", "global")


class Policy:
    """What all policies share: initial residents, utilities, cost models. Class attributes say what a policy may do."""

    name: str  # registry name
    source: str  # where the rule comes from
    lossless = True  # output does not depend on the policy, up to the order of sums
    speculates: bool  # prefetches for the next layers
    look_ahead = 1  # how many of them each prediction names, nearest first
    fetches: bool  # copies missed experts of the current layer
    waits_in_flight: bool  # a running prefetch that the layer needs is offered to `on_route` as `view.in_flight`
    resident_first: bool | None = None  # False: residents wait for the copies; None: the engine's setting
    uses_cpu = True  # False: every active expert runs on the GPU, and the CPU path is not paid
    waves = False  # may plan more copies than there are slots: they are copied and run in waves
    keeps_fetched = True  # False: exact copies go to the extra slots and are given up after the layer
    posts = False  # copies after the step
    waits_for_posts = False  # the next step starts once they have landed
    pool_scopes: Sequence[str] = SCOPES  # whose slots a copy may take, the usual one first: "layer", its own layer's | "global", any layer's
    defers = 0  # lowest-weight experts of a token whose CPU part may come one layer late: lossy
    evicts = "utility"  # eviction rule, unless the options name one
    uses: Sequence[Sequence[Sequence[int]]] | None = None  # `[layer][expert]` steps of use, known in a replay only

    def __init__(self, options: PolicyOptions = DEFAULTS):
        self.options = options

    def start(
        self,
        shape: ModelShape,
        capacity: int,
        prior: CostPrior,
        popularity: Sequence[Sequence[float]] | None = None,
        seed: int = 0,
    ) -> None:
        """Begin a run with `capacity` slots a layer. `popularity[layer][expert]` counts activations on a calibration split."""
        if popularity is not None and [len(row) for row in popularity] != [shape.experts] * shape.layers:
            raise ValueError(f"popularity must have {shape.layers} rows of {shape.experts} counts")
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} slots; it must be 0 or more")
        options = self.options
        self.shape, self.capacity, self.popularity, self.seed = shape, min(capacity, shape.experts), popularity, seed
        self._utility = [self._eviction(i, popularity[i] if popularity is not None else None) for i in range(shape.layers)]
        self._models = {
            phase: AffineModel(prior, shape, options.forgetting)
            if options.cost == "affine"
            else RateModel(prior, shape, options.rate_ema)
            for phase in get_args(Phase)
        }

    def by_popularity(self, layer: int) -> list[int]:
        """All experts, most popular first; by id where nothing is known."""
        row = self.popularity[layer] if self.popularity is not None else [0] * self.shape.experts
        return sorted(range(self.shape.experts), key=lambda e: (-row[e], e))

    def _eviction(self, layer: int, popularity: Sequence[float] | None):
        rule, decay = self.options.evict or self.evicts, self.options.utility_decay
        if rule == "belady":
            if self.uses is None:
                raise ValueError("eviction rule 'belady' needs to know the future: it exists in a replay only")
            return Belady(self.uses[layer], decay, popularity)
        if rule not in RULES:
            raise ValueError(f"unknown eviction rule {rule!r}; there are {', '.join(RULES)}")
        return RULES[rule](self.shape.experts, decay, popularity)

    def scope(self, asked: str | None) -> str:
        """`asked`, or the usual one. Raises ValueError where the policy cannot do with it."""
        if asked is not None and asked not in self.pool_scopes:
            why = "chooses among a layer's own residents" if asked == "global" else "places experts over all layers together"
            raise ValueError(f"pool_scope is {asked!r}, but policy {self.name!r} {why}: leave it out, or say {self.pool_scopes[0]!r}")
        return asked or self.pool_scopes[0]

    def extra_slots(self, capacity: int) -> int:
        """Slots a layer that the policy needs beside its `capacity` residents; they start empty."""
        return 0

    def further_slots(self, shape: ModelShape, pool: int, gpus: int) -> int:
        """Where there are several GPUs (a simulation): of each one's `pool` slots a layer, those for further copies of experts that another GPU holds.
        Asked before `start`, whose capacity is that of the other slots of all GPUs."""
        return 0

    def replicate(self, layer: int, prediction: Prediction, copies: Mapping[int, int]) -> tuple[Sequence[int], Sequence[int]]:
        """(experts that a further GPU should hold, most wanted first; those whose further copies may go, in order) of the next layer. `copies`: how
        many further copies there are, by expert. Called after each layer, if `speculates` and there are further slots."""
        return (), ()

    def initial(self, layer: int) -> tuple[int, ...]:
        """Residents before the first step: the most popular experts, or evenly spaced ids from a seeded start."""
        experts, capacity = self.shape.experts, self.capacity
        if self.popularity is not None:
            return tuple(self.by_popularity(layer)[:capacity])
        first = random.Random(self.seed * 1_000_003 + layer).randrange(experts)
        return tuple((first + k * experts // capacity) % experts for k in range(capacity))

    def costs(self, phase: Phase) -> Costs:
        """What work costs now, frozen: later observations do not change it."""
        return self._models[phase].costs()

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict | None:
        """What else a decision rests on, as JSON values; becomes `view.memory`, so that a record can be decided again."""
        return None

    def on_route(self, view: RouteView) -> Plan:
        """Decide one layer. Pure: the same view gives the same plan."""
        raise NotImplementedError

    def holds(self, view: RouteView) -> frozenset[int]:
        """Experts that later waves of copies may not evict where they are resident; at least one slot must hold none of them."""
        return frozenset()

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        """Absent experts of a following MoE layer to prefetch, in order; none unless the policy speculates.

        Called for each of the next `look_ahead` layers, nearest first; copies for nearer layers go first.
        """
        return speculative_order(prediction, resident) if self.speculates else ()

    def victims(self, layer: int, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        """Up to `count` of `candidates` to evict, least useful first."""
        return self._utility[layer].lowest(candidates, count, step)

    def victims_for(self, layer: int, incoming: Sequence[int], candidates: Collection[int], step: int) -> tuple[int, ...]:
        """Victims for copies ahead of need, one for each of `incoming` in order; fewer where a copy is not worth its victim."""
        return self.victims(layer, candidates, len(incoming), step)

    def victims_anywhere(
        self, layer: int, candidates: Mapping[int, Collection[int]], count: int, step: int
    ) -> tuple[tuple[int, int], ...]:
        """As `victims`, where slots are for any layer: (layer, expert) of `candidates[layer]`, while `layer` runs in `step`."""
        rules = self._utility
        # a layer that has run is as of its next run
        keys = [(key, at) for at, experts in candidates.items() for key in rules[at].keys(at, experts, step + (at <= layer))]
        chosen = [(at, key[-1]) for key, at in heapq.nsmallest(count, keys)]
        for at, e in chosen:
            rules[at].leave(e)
        return tuple(chosen)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        """Learn from a finished layer's loads (utilities)."""
        self._utility[layer].update(step, loads)

    def observe(self, phase: Phase, seen: Observation) -> None:
        """Learn from a layer's times (cost model). They may be known only while a later layer runs."""
        self._models[phase].observe(seen)

    def on_step_done(self, step: int) -> tuple[tuple[int, int], ...]:
        """(layer, expert) copies to make after the step, in order."""
        return ()
