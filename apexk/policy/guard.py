"""The guard: a layer whose copying plans measure slower than no copy at all stops copying for a while.

A cost model can be wrong in ways that its own fit does not show, and public engines have run 8 to 40 times slower than the
choice they rejected. For each layer and phase an average of measured path over the estimated path without copies is
kept, over plans that copied. Above `MARGIN` the layer runs without copies for `REST` steps, then tries again; each
further loss doubles the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .types import Observation, Phase

MARGIN = 0.02  # loss, as a fraction of the path without copies, that is still taken for noise
SAMPLES = 8  # copying plans before a layer is judged
WEIGHT = 0.2  # of the newest one
REST, LONGEST_REST = 32, 1024  # steps

log = logging.getLogger("apexk.policy")


@dataclass
class Watch:
    """One layer in one phase."""

    loss: float = 0.0
    samples: int = 0
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
        loss = seen.path_ms / seen.unassigned_ms - 1.0
        watch.loss = loss if not watch.samples else (1 - WEIGHT) * watch.loss + WEIGHT * loss
        watch.samples += 1
        if watch.samples >= SAMPLES and watch.loss > MARGIN and not watch.resting:
            log.warning("layer %d, %s: copying plans measure %.0f %% slower than no copy; none for %d steps", seen.layer, phase, 100 * watch.loss, watch.rest)
            watch.resting, watch.rest = watch.rest, min(2 * watch.rest, LONGEST_REST)
            watch.loss, watch.samples = 0.0, 0

    def layer_done(self, phase: Phase, layer: int) -> None:
        watch = self.watched.get((phase, layer))
        if watch is not None and watch.resting:
            watch.resting -= 1
            self.guarded += 1
