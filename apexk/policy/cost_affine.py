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
    """One fit, kept as the weighted normal equations `gram @ x = rhs`.

    `start` is the prior's coefficients and `typical` the regressors of a typical sample; both fix the prior's weight.
    """

    def __init__(self, start: Sequence[float], typical: Sequence[float], forgetting: float):
        total = sum(c * x for c, x in zip(start, typical, strict=True)) or TINY_MS
        unsure = [max(c, UNSURE * total / x) for c, x in zip(start, typical, strict=True)]
        self.prior_gram = [(NOISE * total / u) ** 2 for u in unsure]
        self.prior_rhs = [w * c for w, c in zip(self.prior_gram, start, strict=True)]
        size = range(len(start))
        self.gram = [[self.prior_gram[i] if i == j else 0.0 for j in size] for i in size]
        self.rhs = list(self.prior_rhs)
        self.forgetting = forgetting
        self.fitted: tuple[float, ...] | None = tuple(start)

    def add(self, sample: Sequence[float], ms: float) -> None:
        keep, back = self.forgetting, 1.0 - self.forgetting
        prior, rhs = self.prior_gram, self.rhs
        for i, x in enumerate(sample):
            row = [keep * old + x * y for old, y in zip(self.gram[i], sample, strict=True)]
            row[i] += back * prior[i]
            self.gram[i] = row
            rhs[i] = keep * rhs[i] + x * ms + back * self.prior_rhs[i]
        self.fitted = None

    def fit(self) -> tuple[float, ...]:
        """Coefficients, none negative: a negative one is set to zero and the others are fitted again without it."""
        if self.fitted is None:
            free = list(range(len(self.rhs)))
            values = solve(self.gram, self.rhs, free)
            while free and min(values) < 0.0:
                del free[values.index(min(values))]
                values = solve(self.gram, self.rhs, free)
            full = dict(zip(free, values, strict=True))
            self.fitted = tuple(full.get(i, 0.0) for i in range(len(self.rhs)))
        return self.fitted


def solve(gram: Sequence[Sequence[float]], rhs: Sequence[float], keep: Sequence[int]) -> list[float]:
    """Solve the positive definite system restricted to the indices `keep`, at most three, by elimination without pivoting."""
    if len(keep) == 3:
        i, j, k = keep
        a, b, c = gram[i][i], gram[i][j], gram[i][k]
        f, g = b / a, c / a
        d, e, y = gram[j][j] - f * b, gram[j][k] - f * c, rhs[j] - f * rhs[i]
        h = e / d
        z = (rhs[k] - g * rhs[i] - h * y) / (gram[k][k] - g * c - h * e)
        y = (y - e * z) / d
        return [(rhs[i] - b * y - c * z) / a, y, z]
    if len(keep) == 2:
        i, j = keep
        a, b = gram[i][i], gram[i][j]
        f = b / a
        y = (rhs[j] - f * rhs[i]) / (gram[j][j] - f * b)
        return [(rhs[i] - b * y) / a, y]
    return [rhs[i] / gram[i][i] for i in keep]
