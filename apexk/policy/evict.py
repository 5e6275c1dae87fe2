"""Which resident expert gives up its slot: the eviction rules, and the candidates that they may be asked about.

Each rule keeps the history of one layer; `keys` compare its experts with those of others, where slots are for any layer: the
smallest goes first, the last item is the expert; `step` is the layer's next. Utilities, the paper's and ours: `apexk.policy.utility`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from .utility import LayerUtility, LearntUtility, Rule

PrefetchRule = Literal["predicted", "in_use"]
NEVER = 1 << 60


class LeastRecent(Rule):
    """`lru`: the expert that has been inactive longest; ties by lower popularity, then id."""

    def __init__(self, experts: int, popularity: Sequence[float] | None = None):
        self.popularity = list(popularity) if popularity is not None else [0.0] * experts
        self.active = [-1] * experts

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        for expert in loads:
            self.active[expert] = step

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        return _first([(self.active[e], self.popularity[e], e) for e in candidates], count)

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        active, popularity = self.active, self.popularity
        return [(active[e], layer, popularity[e], e) for e in experts]


class LeastFrequent(Rule):
    """`lfu`: the expert that was active in the fewest steps, popularity's order among equals; ties by longest inactive."""

    def __init__(self, experts: int, popularity: Sequence[float] | None = None):
        self.popularity = list(popularity) if popularity is not None else [0.0] * experts
        self.count, self.active = [0] * experts, [-1] * experts

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        for expert in loads:
            self.count[expert] += 1
            self.active[expert] = step

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        return _first([(self.count[e], self.popularity[e], self.active[e], e) for e in candidates], count)

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        return [(self.count[e], self.popularity[e], self.active[e], layer, e) for e in experts]


class LeastStale(Rule):
    """`least_stale`: experts that the newest step did not use go first, the one that came into use earliest ahead.

    In the newest step's set the same order holds. An expert comes into use again after it was named as a victim.
    """

    def __init__(self, experts: int, popularity: Sequence[float] | None = None):
        self.newest = -1
        self.entered, self.active = [-1] * experts, [-1] * experts

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        self.newest = step
        for expert in loads:
            self.active[expert] = step
            if self.entered[expert] < 0:
                self.entered[expert] = step

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        chosen = _first([(self.active[e] == self.newest, self.entered[e], e) for e in candidates], count)
        for expert in chosen:
            self.leave(expert)
        return chosen

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        return [(self.active[e] == self.newest, self.entered[e], layer, e) for e in experts]

    def leave(self, expert: int) -> None:
        self.entered[expert] = -1


class ScoreCache(Rule):
    """`score`, HybriMoE's: `q <- a*s + (1-a)*q` in each step, a = 1/2, s the token share of the step's 2K heaviest experts, else 0.

    K is not known here: the heaviest sixteenth of all experts, at least two, stands for 2K.
    """

    def __init__(self, experts: int, popularity: Sequence[float] | None = None):
        self.utility = LayerUtility(experts, 0.5, popularity)
        self.top = max(2, experts // 16)

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        total = sum(loads.values())
        heavy = heapq.nsmallest(self.top, loads, key=lambda e: (-loads[e], e))
        self.utility.update(step, {e: 0.5 * loads[e] / total for e in heavy})

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        return self.utility.lowest(candidates, count, step)

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        return self.utility.keys(layer, experts, step)


class Belady(LayerUtility):
    """`belady`, replay only: the expert whose next use is farthest away; never used again first, then least utility."""

    def __init__(self, uses: Sequence[Sequence[int]], decay: float, popularity: Sequence[float] | None = None):
        super().__init__(len(uses), decay, popularity)
        self.uses = uses

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        return _first([(-self._next(e, step), self.read(e, step), e) for e in candidates], count)

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        return [(-self._next(e, step), -layer, self.read(e, step), e) for e in experts]

    def _next(self, expert: int, step: int) -> int:
        steps = self.uses[expert]
        at = bisect_left(steps, step)
        return steps[at] if at < len(steps) else NEVER


def _first(ranked: list[tuple], count: int) -> tuple[int, ...]:
    """Expert ids (last in each tuple) of the `count` smallest."""
    if count <= 0:
        return ()
    chosen = heapq.nsmallest(count, ranked) if count < 4 else sorted(ranked)[:count]
    return tuple([item[-1] for item in chosen])


#: rule -> maker(experts, decay, popularity); `belady` is made by the policy that knows the future
RULES: dict[str, Callable] = {
    "utility": LayerUtility,
    "learnt": LearntUtility,
    "lru": lambda experts, decay, popularity: LeastRecent(experts, popularity),
    "lfu": lambda experts, decay, popularity: LeastFrequent(experts, popularity),
    "score": lambda experts, decay, popularity: ScoreCache(experts, popularity),
    "least_stale": lambda experts, decay, popularity: LeastStale(experts, popularity),
}


def exact_candidates(resident: Collection[int], active: Collection[int], held: Collection[int]) -> set[int]:
    """Residents of a layer that an exact copy into it may replace: not needed by this step, not held by plan, channel or pin."""
    return set(resident).difference(active, held)


def prefetch_candidates(
    resident: Collection[int],
    predicted: Collection[int],
    prefetched: Collection[int],
    held: Collection[int],
    in_use: Collection[int],
    rule: PrefetchRule = "predicted",
) -> set[int]:
    """Residents of the next layer that a speculative copy into it may replace.

    Never one that is held, being read, or prefetched in this step (a prefetch must not push out the one before it). The
    rule `predicted` also keeps the residents that the prediction calls active; `in_use` does not look at the prediction.
    """
    if rule not in ("predicted", "in_use"):
        raise ValueError(f"unknown prefetch victim rule {rule!r}; there are 'predicted' and 'in_use'")
    keep = set(resident).difference(prefetched, held, in_use)
    return keep.difference(predicted) if rule == "predicted" else keep
