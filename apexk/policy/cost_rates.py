"""Cost model `rates`: three exponential averages, as in the paper.

`v <- (1 - beta)*v + beta*x` after each MoE layer, with x the layer's own CPU pairs/ms, GPU pairs/ms or copies/ms. A path
without work, or with less than 20 us of it (mostly the clock's own noise), teaches nothing. Times are taken while the
other path runs, since an isolated micro-benchmark measures another machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .types import CostPrior, ModelShape, Observation

SHORTEST_SAMPLE_MS = 0.020
TINY_MS = 1e-6  # stands for "no time at all" in a prior, where a rate would be infinite


@dataclass(frozen=True)
class RateCosts:
    """Time proportional to work: `cpu` and `gpu` in token-expert pairs per ms, `copy` in experts per ms (all > 0)."""

    cpu: float
    gpu: float
    copy: float

    def cpu_ms(self, experts: int, pairs: int) -> float:
        return pairs / self.cpu

    def copy_ms(self, copies: int) -> float:
        return copies / self.copy

    def gpu_ms(self, experts: int, pairs: int) -> float:
        return pairs / self.gpu

    def as_dict(self) -> dict:
        return {"kind": "rates", **asdict(self)}


class RateModel:
    """Learns `RateCosts` of one phase. The start values are the prior's costs at a typical demand (see `typical_demand`)."""

    def __init__(self, prior: CostPrior, shape: ModelShape, ema: float):
        experts, pairs, copies = typical_demand(shape)
        self.ema = ema
        self.cpu = pairs / max(prior.c0 + prior.a * experts + prior.b * pairs, TINY_MS)
        self.gpu = pairs / max(prior.g0 + prior.g1 * experts + prior.g2 * pairs, TINY_MS)
        self.copy = copies / max(prior.s0 + prior.t1 * copies, TINY_MS)

    def observe(self, seen: Observation) -> None:
        self.cpu = self._mix(self.cpu, seen.cpu_pairs, seen.cpu_ms)
        self.gpu = self._mix(self.gpu, seen.gpu_pairs, seen.gpu_ms)
        self.copy = self._mix(self.copy, seen.copies, seen.copy_ms)

    def costs(self) -> RateCosts:
        return RateCosts(self.cpu, self.gpu, self.copy)

    def _mix(self, rate: float, work: int, ms: float | None) -> float:
        if not work or ms is None or ms < SHORTEST_SAMPLE_MS:
            return rate
        return (1.0 - self.ema) * rate + self.ema * (work / ms)


def typical_demand(shape: ModelShape) -> tuple[int, int, int]:
    """(experts, pairs, copies) of a small decode batch, where the prior is turned into rates or trusted: a choice of ours."""
    return 2 * shape.topk, 4 * shape.topk, 4
