"""What the lanes of a run did: sums over a timeline's rows while they are made, so that no row has to be kept."""

from __future__ import annotations

from dataclasses import dataclass

from apexk.profiling.intervals import Set, intersect, length, subtract, union
from apexk.timeline.writer import Timeline


@dataclass
class Lanes:
    """Sums of one phase, in ns. GPU work is attention, experts and merge; `unattributed` is what a hardware file's kappa adds.

    Between a layer's routing and its merge the GPU may stand still: `for_weights` while one of the layer's copies runs,
    `for_cpu` otherwise.
    """

    gpu: int = 0
    unattributed: int = 0
    link: int = 0
    cpu: int = 0
    for_weights: int = 0
    for_cpu: int = 0


class Meter(Timeline):
    """A timeline that is listened to and keeps nothing. `close_layer()` ends the last layer."""

    def __init__(self):
        super().__init__()
        self.phases = {"prefill": Lanes(), "decode": Lanes()}
        self._phase, self._layer, self._routed, self._merge = "decode", 0, 0, 0
        self._gpu: Set = []
        self._copies: Set = []

    @property
    def active(self) -> bool:
        return True

    def add(self, *, kind: str, lane: str, phase: str, start_ns: int, end_ns: int, layer: int, **more) -> None:
        lanes = self.phases[phase]
        if kind == "attention":
            self.close_layer()
            self._phase, self._layer = phase, layer
        elif kind == "route":
            self._routed = self._merge = end_ns
        elif kind == "combine":
            self._merge = start_ns
        if lane == "gpu" and kind == "unattributed":
            lanes.unattributed += end_ns - start_ns
        elif lane == "gpu":
            lanes.gpu += end_ns - start_ns
        elif lane == "h2d":
            lanes.link += end_ns - start_ns
        elif lane == "cpu":
            lanes.cpu += end_ns - start_ns
        if lane == "gpu" and end_ns > start_ns:
            self._gpu.append((start_ns, end_ns))
        elif lane == "h2d" and layer == self._layer:
            self._copies.append((start_ns, end_ns))

    def close_layer(self) -> None:
        """Books what the GPU waited for in the layer that ends."""
        waits = subtract(union([(self._routed, self._merge)]), union(self._gpu))
        for_weights = length(intersect(waits, union(self._copies)))
        lanes = self.phases[self._phase]
        lanes.for_weights += for_weights
        lanes.for_cpu += length(waits) - for_weights
        self._gpu, self._copies, self._routed, self._merge = [], [], 0, 0
