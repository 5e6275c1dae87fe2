"""Cost model `affine`: a fixed part plus a part per expert and per pair, fitted while the model runs.

    CPU  c0 + a*experts + b*pairs        copies  s0 + t1*copies        GPU  g0 + g1*experts + g2*pairs        [ms]

The fixed parts hold hand-over, set-up and merge, which a pure rate hides and then over- or underestimates with every
change of load. Each line is a least-squares fit in which a sample's weight falls by `forgetting` with every newer one and
the weight that is lost goes back to the prior. So a direction that the samples do not span (one token a step: experts and
pairs are equal) stays at the prior's value instead of drifting, and new behaviour is still learnt after any length of run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter

from .cost_rates import TINY_MS, typical_demand
from .types import CostPrior, ModelShape, Observation

# The prior counts as if seen with 10 % noise and every coefficient known to its own size, or, for those near zero, to a
# quarter of the whole typical time. One or two samples outweigh it.
NOISE = 0.10
UNSURE = 0.25


@dataclass(frozen=True)
class AffineCosts(CostPrior):
    """The fitted lines; coefficients as in `CostPrior` (>= 0, so costs never fall with more work). No work costs nothing,
    except that `cpu_fixed_when_empty` keeps the CPU's `c0`, as the published measurements need it."""

    def cpu_ms(self, experts: int, pairs: int) -> float:
        if not experts:
            return self.c0 if self.cpu_fixed_when_empty else 0.0
        return self.c0 + self.a * experts + self.b * pairs

    def copy_ms(self, copies: int) -> float:
        return self.s0 + self.t1 * copies if copies else 0.0

    def gpu_ms(self, experts: int, pairs: int) -> float:
        return self.g0 + self.g1 * experts + self.g2 * pairs if experts else 0.0

    def as_dict(self) -> dict:
        return {"kind": "affine", **asdict(self)}


class AffineModel:
    """Learns `AffineCosts` of one phase."""

    def __init__(self, prior: CostPrior, shape: ModelShape, forgetting: float):
        experts, pairs, copies = typical_demand(shape)
        self.cpu = Line((prior.c0, prior.a, prior.b), (1, experts, pairs), forgetting)
        self.copy = Line((prior.s0, prior.t1), (1, copies), forgetting)
        self.gpu = Line((prior.g0, prior.g1, prior.g2), (1, experts, pairs), forgetting)
        self.fixed_when_empty = prior.cpu_fixed_when_empty
        self._costs = self._fit()

    def observe(self, seen: Observation) -> None:
        """Take in one layer's times; a path without work, or with no time, teaches nothing."""
        if seen.cpu_experts and seen.cpu_ms:
            self.cpu.add((1, seen.cpu_experts, seen.cpu_pairs), seen.cpu_ms)
        if seen.copies and seen.copy_ms:
            self.copy.add((1, seen.copies), seen.copy_ms)
        if seen.gpu_experts and seen.gpu_ms:
            self.gpu.add((1, seen.gpu_experts, seen.gpu_pairs), seen.gpu_ms)
        self._costs = self._fit()

    def costs(self) -> AffineCosts:
        """The fit as of the last sample, ready made: this is asked for at the routing event, where every microsecond shows."""
        return self._costs

    def _fit(self) -> AffineCosts:
        return AffineCosts(*self.cpu.fit(), *self.copy.fit(), *self.gpu.fit(), self.fixed_when_empty)


class Line:
    """One fit, kept as the weighted normal equations, row by row of `[gram | rhs]` from the diagonal on.

    `start` is the prior's coefficients and `typical` the regressors of a typical sample; both fix the prior's weight.
    """

    def __init__(self, start: Sequence[float], typical: Sequence[float], forgetting: float):
        total = sum(c * x for c, x in zip(start, typical, strict=True)) or TINY_MS
        weights = [(NOISE * total / max(c, UNSURE * total / x)) ** 2 for c, x in zip(start, typical, strict=True)]
        self.size = len(start)
        self.places = [(i, j) for i in range(self.size) for j in range(i, self.size + 1)]
        self.sums = [w if i == j else w * start[i] if j == self.size else 0.0 for w, (i, j) in ((weights[p[0]], p) for p in self.places)]
        self.rows, self.columns = (itemgetter(*numbers) for numbers in zip(*self.places, strict=True))
        self.forgetting = forgetting
        self.back = [(1.0 - forgetting) * prior for prior in self.sums]  # what each sample returns to the prior
        self.fitted: tuple[float, ...] | None = tuple(start)

    def add(self, sample: Sequence[float], ms: float) -> None:
        keep, seen = self.forgetting, (*sample, ms)
        self.sums = [keep * old + x * y + back for old, x, y, back in zip(self.sums, self.rows(seen), self.columns(seen), self.back, strict=True)]
        self.fitted = None

    def fit(self) -> tuple[float, ...]:
        """Coefficients, none negative: a negative one is set to zero and the others are fitted again without it."""
        if self.fitted is None:
            values = solve(self.sums)
            if min(values) < 0.0:
                values = self._without(values)
            self.fitted = tuple(values)
        return self.fitted

    def _without(self, values: Sequence[float]) -> list[float]:
        free = list(range(self.size))
        while free and min(values) < 0.0:
            del free[values.index(min(values))]
            values = solve([s for s, (i, j) in zip(self.sums, self.places, strict=True) if i in free and (j in free or j == self.size)])
        full = dict(zip(free, values, strict=True))
        return [full.get(i, 0.0) for i in range(self.size)]


def solve(sums: Sequence[float]) -> list[float]:
    """Solves a positive definite system of at most three unknowns by elimination without pivoting.

    `sums` holds each row of `[matrix | right side]` from the diagonal on: nine numbers for three unknowns, five for two.
    """
    if len(sums) == 9:
        a, b, c, x, d, e, y, g, z = sums
        f, h = b / a, c / a
        d, e, y, g, z = d - f * b, e - f * c, y - f * x, g - h * c, z - h * x
        h = e / d
        z = (z - h * y) / (g - h * e)
        y = (y - e * z) / d
        return [(x - b * y - c * z) / a, y, z]
    if len(sums) == 5:
        a, b, x, d, y = sums
        f = b / a
        y = (y - f * x) / (d - f * b)
        return [(x - b * y) / a, y]
    return [sums[1] / sums[0]] if sums else []
