"""Which resident expert gives up its slot: decayed load utility, and the candidates that may be asked.

Utility of an expert: `u <- gamma*u + n` at the end of its layer in each step, n its token load (0 if inactive). It starts
from popularity, scaled so that the layer's total equals the first load seen. Decay is applied on reading, by
gamma^(steps since the last update).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

PrefetchRule = Literal["predicted", "in_use"]


class LayerUtility:
    """Utilities of one layer's experts. `popularity` (>= 0 each, any unit) may be None: all start at zero."""

    def __init__(self, experts: int, decay: float, popularity: Sequence[float] | None = None):
        total = sum(popularity) if popularity is not None else 0
        self.decay = decay
        self.value = [p / total for p in popularity] if total else [0.0] * experts
        self.seeded = not total  # until the first loads, values are shares of the layer's load
        self.updated = [-1] * experts
        self.active = [-1] * experts  # last step with a token; -1 before any

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        """End of the layer in `step`; steps must not go back."""
        if not self.seeded and loads:
            total = sum(loads.values())
            self.value = [v * total for v in self.value]
            self.seeded = True
        for expert, load in loads.items():
            self.value[expert] = self.read(expert, step) + load
            self.updated[expert] = self.active[expert] = step

    def read(self, expert: int, step: int) -> float:
        """Utility as decayed to `step`; in tokens once the layer has run."""
        return self.value[expert] * self.decay ** (step - self.updated[expert])

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        """The `count` least useful candidates, worst first; ties: longest inactive, then lowest id. Fewer if there are fewer."""
        return tuple(heapq.nsmallest(count, candidates, key=lambda e: (self.read(e, step), self.active[e], e)))


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
