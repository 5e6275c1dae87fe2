"""Which resident expert gives up its slot: the eviction rules, and the candidates that they may be asked about.

Each rule keeps the history of one layer; `keys` compare its experts with those of others, where slots are for any layer: the
smallest goes first, the last item is the expert; `step` is the layer's next. `utility`, the paper's: `u <- gamma*u + n` at the end of the layer in each step,
n its token load (0 if inactive). It starts from popularity, scaled so that the layer's total equals the first load seen.
Decay is applied on reading, by gamma^(steps since the last update).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import log1p
from operator import mul
from typing import Literal

from .cost_affine import solve

PrefetchRule = Literal["predicted", "in_use"]
NEVER = 1 << 60


class Rule:
    """What all rules have; each has `update(step, loads)`, `lowest(candidates, count, step)` and `keys(layer, experts, step)`."""

    def leave(self, expert: int) -> None:
        """The expert, one of another layer's victims, is evicted; `lowest` says so itself."""


class LayerUtility(Rule):
    """Utilities of one layer's experts. `popularity` (>= 0 each, any unit) may be None: all start at zero."""

    def __init__(self, experts: int, decay: float, popularity: Sequence[float] | None = None):
        total = sum(popularity) if popularity is not None else 0
        self.decay = decay
        self.powers = [1.0]  # decay**n, as far as it was asked for
        self.value = [p / total for p in popularity] if total else [0.0] * experts
        self.seeded = not total  # until the first loads, values are shares of the layer's load
        self.active = [-1] * experts  # last step with a token, which `value` is as of; -1 before any
        self.order = list(range(-experts, 0))  # by `active`, then by id: active * experts + id
        self.scores: dict[int, float] = {}  # as of step `scored`, for those that were asked for
        self.scored = -1

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        """End of the layer in `step`; steps must not go back."""
        if not self.seeded and loads:
            total = sum(loads.values())
            self.value = [v * total for v in self.value]
            self.seeded = True
        self._reach(step + 1)
        value, active, order, powers, first = self.value, self.active, self.order, self.powers, step * len(self.active)
        for expert, load in loads.items():
            value[expert] = value[expert] * powers[step - active[expert]] + load
            active[expert] = step
            order[expert] = first + expert
        self.scored = -1

    def read(self, expert: int, step: int) -> float:
        """Utility as decayed to `step`; in tokens once the layer has run."""
        self._reach(step + 1)
        return self.value[expert] * self.powers[step - self.active[expert]]

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        """The `count` least useful candidates, worst first; ties: longest inactive, then lowest id. Fewer if there are fewer."""
        if count <= 0:
            return ()
        if self.scored != step:
            self._reach(step + 1)
            self.scores, self.scored = {}, step
        self._score(candidates if not self.scores else set(candidates).difference(self.scores), step)
        ranked = sorted(candidates, key=self.order.__getitem__)
        ranked.sort(key=self.scores.__getitem__)  # stable
        return tuple(ranked[:count])

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        self._reach(step + 1)
        value, active, powers = self.value, self.active, self.powers
        return [(value[e] * powers[step - active[e]], active[e], layer, e) for e in experts]

    def _score(self, experts: Collection[int], step: int) -> None:
        value, active, powers = self.value, self.active, self.powers
        self.scores.update({e: value[e] * powers[step - active[e]] for e in experts})

    def _reach(self, exponent: int) -> None:
        while len(self.powers) <= exponent:
            self.powers.append(self.decay ** len(self.powers))


class LearntUtility(LayerUtility):
    """`learnt`: fast utility plus standing popularity, in a proportion that each layer learns while it runs. Ours.

        u <- gamma*u + log(1 + n)        value = u + w*s        s = log(1 + popularity)

    popularity scaled as for `utility`: the layer's total equals the first load seen.

    What an expert did lately tells of the text's topic, popularity of the model, and how much of either carries over to the
    next step differs between layers and texts. `w` is the ratio c/b in the least-squares line a + b*u + c*s for the next
    step's log(1 + n), over all experts of the layer, older steps counting less by `KEEP`; it is held between 0 and `MOST`.
    Its sums are updated from active experts alone: u of all others only decays. Without popularity it is `utility` with
    concave loads.
    """

    KEEP = 0.98  # of the line's sums, a step
    FIRST, MOST = 0.5, 4.0  # of w
    SAMPLES = 3  # steps before the line is believed
    RIDGE = 1e-6  # keeps the line defined where popularity says nothing

    def __init__(self, experts: int, decay: float, popularity: Sequence[float] | None = None):
        super().__init__(experts, decay, None)
        total = sum(popularity) if popularity is not None else 0
        self.share = [p / total for p in popularity] if total else None
        self.standing = self.share or [0.0] * experts  # s; until the first loads tell the layer's total: shares
        self.standing_sums: tuple[float, float, float] | None = None  # over all experts: 1, s, s*s
        self.utility_sums = [0.0, 0.0, 0.0]  # over all experts: u, u*u, u*s, as of the end of step `learnt`
        self.weight, self.samples, self.learnt = self.FIRST, 0, -1
        self.sums = [0.0] * 9  # of the line's normal equations, as `solve` takes them

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        """One sample of every expert for the line: (1, u as decayed to this step, s) -> y, its log(1 + n) in this step."""
        if self.standing_sums is None and self.share and loads:
            total = sum(loads.values())
            self.standing = [log1p(share * total) for share in self.share]
            self.standing_sums = (len(self.standing), sum(self.standing), sum([s * s for s in self.standing]))
        self._reach(step + 1)
        value, active, order, powers, standing, first = self.value, self.active, self.order, self.powers, self.standing, step * len(self.active)
        ys, us = list(map(log1p, loads.values())), [value[e] * powers[step - active[e]] for e in loads]
        if self.standing_sums:
            sums = (sum(ys), sum(map(mul, ys, ys)), sum(map(mul, ys, us)), sum(map(mul, ys, map(standing.__getitem__, loads))))
            self._learn(step, *sums)
        for expert, y, u in zip(loads, ys, us, strict=True):
            value[expert] = u + y
            active[expert] = step
            order[expert] = first + expert
        self.scored = -1

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        weight, standing = self.weight, self.standing
        return [(u + weight * standing[e], *rest, e) for u, *rest, e in super().keys(layer, experts, step)]

    def _score(self, experts: Collection[int], step: int) -> None:
        value, active, powers, weight, standing = self.value, self.active, self.powers, self.weight, self.standing
        self.scores.update({e: value[e] * powers[step - active[e]] + weight * standing[e] for e in experts})

    def _learn(self, step: int, sum_y: float, sum_yy: float, sum_uy: float, sum_sy: float) -> None:
        kept = self.powers[step - self.learnt]
        sum_u, sum_uu, sum_us = self.utility_sums
        sum_u, sum_uu, sum_us = kept * sum_u, kept * kept * sum_uu, kept * sum_us
        experts, sum_s, sum_ss = self.standing_sums
        if self.samples:  # before the first there is no u
            keep = self.KEEP
            newest = (experts, sum_u, sum_s, sum_y, sum_uu + self.RIDGE, sum_us, sum_uy, sum_ss + self.RIDGE, sum_sy)
            self.sums = [keep * old + new for old, new in zip(self.sums, newest, strict=True)]
        if self.samples >= self.SAMPLES:
            _, b, c = solve(self.sums)
            self.weight = min(self.MOST, max(0.0, c / b)) if b > 0 else self.MOST
        self.samples += 1
        self.utility_sums, self.learnt = [sum_u + sum_y, sum_uu + 2 * sum_uy + sum_yy, sum_us + sum_sy], step


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
