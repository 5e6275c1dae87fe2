"""From events to numbers: once a layer's times are known, they reach the cost models and the running sums."""

from __future__ import annotations

from dataclasses import dataclass, field

from apexk.device.base import At, Device, Event
from apexk.engine.totals import Totals
from apexk.policy.base import Policy
from apexk.policy.types import Observation


@dataclass
class LayerEvents:
    """The events of one layer whose times are wanted; `routed_ms` is its routing event on the device's clock."""

    at: At
    routed_ms: float
    last_of_step: bool
    tokens: int
    unassigned_ms: float | None = None  # the plan's estimate for no copy
    estimated_ms: float | None = None  # and for what it chose
    cpu_experts: int = 0  # counted once for each part that they run for, as are the kernels'
    cpu_pairs: int = 0
    gpu_pairs: int = 0
    host: Event | None = None  # the last of the CPU's
    launches: list[tuple[int, Event]] = field(default_factory=list)  # (experts, event) of each expert kernel
    copied: int = 0  # experts, by exact copies
    copies: list[Event] = field(default_factory=list)  # theirs, in order
    combined: Event | None = None


class Observer:
    """Keeps finished layers until the device knows their times, then reports them in order; never waits."""

    def __init__(self, device: Device, policy: Policy, totals: dict[str, Totals]):
        self._device, self._policy, self._totals = device, policy, totals
        self._pending: list[LayerEvents] = []
        self._step_began_ms = 0.0

    def add(self, events: LayerEvents) -> None:
        self._pending.append(events)
        self.report()

    def report(self) -> None:
        """Whatever is known by now."""
        while self._pending and self._report(self._pending[0]):
            self._pending.pop(0)

    def forget(self) -> None:
        """Drops what is pending; the next step's time counts from now."""
        self._pending.clear()
        self._step_began_ms = self._device.now_ms()

    def _report(self, layer: LayerEvents) -> bool:
        spans = []
        for event in (layer.combined, *[event for _, event in layer.launches], *layer.copies, *([layer.host] if layer.host else [])):
            span = self._device.span_ms(event)
            if span is None:
                return False
            spans.append(span)
        launched = spans[1 : 1 + len(layer.launches)]
        copied = spans[1 + len(launched) :][: len(layer.copies)]
        cpu_end = spans[-1][1] if layer.host else None
        ends = [end for _, end in launched] + ([cpu_end] if layer.host else [])
        seen = Observation(
            layer=layer.at.layer,
            path_ms=max(ends) - layer.routed_ms if ends else None,
            unassigned_ms=layer.unassigned_ms,
            cpu_experts=layer.cpu_experts,
            cpu_pairs=layer.cpu_pairs,
            cpu_ms=cpu_end - layer.routed_ms if layer.host else None,
            gpu_experts=sum(n for n, _ in layer.launches),
            gpu_pairs=layer.gpu_pairs,
            gpu_ms=sum(end - start for start, end in launched) if launched else None,
            copies=layer.copied,
            copy_ms=max(end for _, end in copied) - min(start for start, _ in copied) if copied else None,
        )
        self._policy.observe(layer.at.phase, seen)
        totals = self._totals[layer.at.phase]
        totals.layers += 1
        if layer.estimated_ms is not None and seen.path_ms:
            totals.estimated += 1
            totals.estimate_error += abs(layer.estimated_ms / seen.path_ms - 1.0)
        totals.cpu_path_ms += seen.cpu_ms or 0.0
        totals.gpu_path_ms += max((end for _, end in launched), default=layer.routed_ms) - layer.routed_ms
        if layer.last_of_step:
            ended = spans[0][1]
            totals.steps += 1
            totals.tokens += layer.tokens
            totals.step_ms += ended - self._step_began_ms
            self._step_began_ms = ended
        return True
