"""The guard: a layer whose copying plans measure slower than no copy at all stops copying for a while.

A cost model can be wrong in ways that its own fit does not show, and public engines have run 8 to 40 times slower than the
choice they rejected. For each layer and phase the newest ratios of measured path to the estimated path without copies are
kept, over plans that copied. If their median is above `MARGIN` the layer runs without copies for `REST` steps, then tries
again; each further loss doubles the rest. The median lets the first steps pass, in which the cost model still learns.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .types import Observation, Phase

MARGIN = 0.02  # loss, as a fraction of the path without copies, that is still taken for noise
SAMPLES = 8  # copying plans that a layer is judged by
REST, LONGEST_REST = 32, 1024  # steps

log = logging.getLogger("apexk.policy")


@dataclass
class Watch:
    """One layer in one phase."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    resting: int = 0
    rest: int = REST


class Guard:
    """Watches all layers; `guarded` counts the layer-steps that ran without copies because of it."""

    def __init__(self):
        self.watched: dict[tuple[Phase, int], Watch] = {}
        self.guarded = 0

    def resting(self, phase: Phase, layer: int) -> bool:
        watch = self.watched.get((phase, layer))
        return watch is not None and watch.resting > 0

    def observe(self, phase: Phase, seen: Observation) -> None:
        """One finished layer. Counts only if it copied and both paths are known."""
        if not seen.copies or not seen.unassigned_ms or seen.path_ms is None:
            return
        watch = self.watched.setdefault((phase, seen.layer), Watch())
        watch.losses.append(seen.path_ms / seen.unassigned_ms - 1.0)
        if len(watch.losses) < SAMPLES or watch.resting or watch.losses[-1] <= MARGIN:
            return
        loss = median(watch.losses)
        if loss > MARGIN:
            log.warning("layer %d, %s: copying plans measure %.0f %% slower than no copy; none for %d steps", seen.layer, phase, 100 * loss, watch.rest)
            watch.resting, watch.rest = watch.rest, min(2 * watch.rest, LONGEST_REST)
            watch.losses.clear()

    def layer_done(self, phase: Phase, layer: int) -> None:
        watch = self.watched.get((phase, layer))
        if watch is not None and watch.resting:
            watch.resting -= 1
            self.guarded += 1
