"""How much better eviction is worth: each rule's share of the distance from the paper's utility to Belady's rule.

Apex runs on generated traces with one eviction rule after the other. 0 % is `utility` with decay 0.9, 100 % is Belady's,
which knows the future. `hidden` knows the generator's state at the end of the step instead: popularity, topic and each
request's own part as they are, and how fast each fades; it ranks experts by the tokens they are to expect over the next
steps. A rule that sees routing alone knows less, so `hidden` bounds what a rule can be asked for on these traces (nearly:
the horizon's weights are a choice, `HORIZON`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, mean

import numpy as np

from apexk import hardware
from apexk.policy.apex import Apex
from apexk.policy.types import PolicyOptions
from apexk.policy.utility import LayerUtility
from apexk.sim import references
from apexk.sim.demand import Demand, demand_of
from apexk.sim.generate import MODELS, PRESETS, Routing, Shape, generate
from apexk.sim.run import simulate

#: rule -> settings of the run
RULES: dict[str, dict] = {
    "utility 0.9": {"evict": "utility", "utility_decay": 0.9},
    "utility 0.5": {"evict": "utility", "utility_decay": 0.5},
    "learnt": {"evict": "learnt"},
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu"},
    "score": {"evict": "score"},
    "least_stale": {"evict": "least_stale"},
}
HORIZON = {1: 1.0, 2: 0.7, 4: 0.5, 8: 0.25}  # steps ahead -> weight


@dataclass(frozen=True)
class Study:
    """One generator preset on one hardware file: `ms[rule]` is the modelled time of a counted step, averaged over the seeds."""

    preset: str
    machine: str
    ms: dict[str, float]

    @property
    def gap(self) -> float:
        """What Belady's rule is worth, as a share of a step."""
        return 1 - self.ms["belady"] / self.ms["utility 0.9"]

    def closed(self, rule: str) -> float:
        """How far `rule` goes from `utility 0.9` (0) to `belady` (1); negative where it is slower than the former."""
        start = self.ms["utility 0.9"]
        return (start - self.ms[rule]) / (start - self.ms["belady"])


def study(presets: Sequence[str], machines: Sequence[str], seeds: Sequence[int], *, model: str = "qwen3_5", layers: int | None = 12, batch: int = 16,
          pool: int = 64, steps: int = 50) -> Iterator[Study]:
    """Every preset (a key of `PRESETS`) on every machine (as `hardware.load` takes it), `model` a key of `MODELS`.

    `layers` None: as many as the model has. A step has `batch` tokens; the first 10 of `steps` are not counted. `pool` counts
    slots of a layer: ValueError where it leaves no choice of a victim.
    """
    shape = MODELS[model]
    if not 1 < pool < shape.experts:
        raise ValueError(f"pool is {pool} slots; wanted 2 to {shape.experts - 1}, or every rule evicts the same")
    shape = Shape(shape.name, layers or shape.layers, shape.experts, shape.topk)
    for preset in presets:
        made = [_trace(preset, shape, batch, steps, seed) for seed in seeds]
        for machine in machines:
            yield Study(preset, machine, _times(made, hardware.load(machine), pool))


class Hidden(LayerUtility):
    """Evicts the experts with the fewest tokens to expect: `expected[step] [E]`, as known after that step."""

    def __init__(self, expected: np.ndarray, experts: int, popularity: Sequence[float] | None):
        super().__init__(experts, 0.5, popularity)
        self.expected, self.newest = expected, -1

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        super().update(step, loads)
        self.newest = step

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        if self.newest < 0:
            return super().lowest(candidates, count, step)
        known = self.expected[self.newest]
        return tuple(sorted(candidates, key=lambda e: (known[e], e))[:count])


class KnowsHidden(Apex):
    """Apex with that eviction, made of `expected [L, steps, E]`."""

    name = "hidden"
    source = "reference: the generator's state"

    def __init__(self, options: PolicyOptions, expected: np.ndarray):
        super().__init__(options)
        self.expected = expected

    def _eviction(self, layer: int, popularity: Sequence[float] | None) -> Hidden:
        return Hidden(self.expected[layer], self.shape.experts, popularity)


def _trace(preset: str, shape: Shape, batch: int, steps: int, seed: int) -> tuple[Demand, np.ndarray]:
    """A generated trace's demand, and the tokens to expect after each of its steps [L, steps, E]."""
    routing, seen = PRESETS[preset], []
    trace = generate(preset, shape=shape, batch=batch, steps=steps, seed=seed, watch=lambda *parts: seen.append(_expected(routing, shape, *parts)))
    return demand_of(trace), np.stack(seen, 1)


def _expected(r: Routing, shape: Shape, popular: np.ndarray, shared: np.ndarray, requests: np.ndarray) -> np.ndarray:
    """Expected tokens over the horizon [L, E], from the lasting parts of the score (see `generate`'s `watch`).

    Scores of a layer are unit normal, so its top-k are nearly those above the normal distribution's 1 - k/E quantile. Of a
    part that correlates by rho from step to step, rho^n is kept after n steps and the rest is drawn anew.
    """
    threshold = NormalDist().inv_cdf(1 - shape.topk / shape.experts)
    variance_shared, variance_own = shared.var(-1, keepdims=True), requests.var((1, 2))[:, None]
    noise = variance_own * (r.ft / r.fr)  # the per-token term
    total = np.zeros(popular.shape)
    for ahead, weight in HORIZON.items():
        kept_shared, kept_own = r.rho_s**ahead, r.rho_r**ahead
        mean_score = (popular + kept_shared * shared)[:, None] + kept_own * requests
        spread = np.sqrt((1 - kept_shared**2) * variance_shared + (1 - kept_own**2) * variance_own + noise)[:, None]
        total += weight * _below((mean_score - threshold) / spread).sum(1)
    return total


def _below(z: np.ndarray) -> np.ndarray:
    """The normal distribution function, as the logistic curve that lies within 0.01 of it."""
    return 1 / (1 + np.exp(-1.702 * z))


def _times(made: Sequence[tuple[Demand, np.ndarray]], machine: hardware.Hardware, pool: int) -> dict[str, float]:
    """Mean ms of a counted step by rule, the references last."""
    def ms(policy: Callable[[Demand, np.ndarray], object], config: dict | None = None) -> float:
        runs = [simulate(demand, machine, policy(demand, expected), pool, config=config) for demand, expected in made]
        return mean(run.report()["decode"]["ms_per_step"] for run in runs)

    found = {rule: ms(lambda *_: "apex", config) for rule, config in RULES.items()}
    found["hidden"] = ms(lambda _, expected: partial(KnowsHidden, expected=expected))
    found["belady"] = ms(lambda demand, _: partial(references.Belady, uses=references.next_uses(demand)))
    return found
