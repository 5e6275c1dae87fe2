"""Times of a GPU's operations on the host's clock, without a sync of its own.

An operation is timed by two events and read once both are done, when its layer is over: mostly at the next layer's routing
event. That event is also the anchor of the two clocks. The device's time of an anchor is the one before it plus what the
device says lies between; the host knows that it happened between the call that recorded it and the return of the wait for
it, and corrects the sum where it has drifted out of that window. So times never need more than a layer's length of the
32-bit milliseconds that CUDA answers with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from apexk.device.base import At
from apexk.device.runtime import CudaRuntime, Event, Stream


@dataclass(eq=False, slots=True)
class Operation:
    """Work on a lane of the device, and its event: done when `end` is. `facts()`, asked where there is a timeline, are its row's. `span` is
    (start, end) in ns once that is known."""

    at: At
    kind: str
    lane: str
    start: Event | None = None
    end: Event | None = None
    facts: Callable[[], dict] = dict
    span: tuple[int, int] | None = None
    anchor: tuple[Event, int] | None = None
    number: int = 0  # of exact copies: they run in this order, on one stream
    experts: int = 1  # that a copy moves

    def read(self, clock: DeviceClock) -> tuple[int, int] | None:
        """(start, end) in ns, None before the end; the events are given back."""
        if not clock.runtime.query(self.end):
            return None
        span = clock.ns(self.start, self.anchor), clock.ns(self.end, self.anchor)
        clock.give(self.start, self.end)
        self.start = self.end = self.anchor = None
        return span


class DeviceClock:
    """Timing events, used again and again, and what they say. `tell(operation)` is called for each whose times are known."""

    def __init__(self, runtime: CudaRuntime, stream: Stream, tell: Callable[[Operation], None]):
        self.runtime, self.tell = runtime, tell
        self._zero = time.perf_counter_ns()
        self._free: list[Event] = []
        self._pending: deque[Operation | Event] = deque()  # an event here is an anchor that nothing behind it needs
        event = self.take()
        runtime.record(event, stream)
        self._anchor = (event, self.now())

    def now(self) -> int:
        """The host's time, ns since the clock was made."""
        return time.perf_counter_ns() - self._zero

    def host_ns(self, perf_counter_ns: int) -> int:
        return perf_counter_ns - self._zero

    def take(self) -> Event:
        return self._free.pop() if self._free else self.runtime.new_event(timing=True)

    def give(self, *events: Event | None) -> None:
        """Events whose time nobody asks for any more."""
        self._free += [event for event in events if event is not None]

    def add(self, *operations: Operation) -> None:
        """Operations whose events have been recorded."""
        for operation in operations:
            operation.anchor = self._anchor
        self._pending.extend(operations)

    def ns(self, event: Event, anchor: tuple[Event, int] | None = None) -> int:
        """When a recorded event that is done happened."""
        first, at = anchor or self._anchor
        return at + round(self.runtime.elapsed_ms(first, event) * 1e6)

    def set_anchor(self, event: Event, before: int) -> None:
        """`event` has just been waited for and was recorded after the host's `before`; it is the clock's from now on."""
        at = min(max(self.ns(event), before), self.now())
        self._pending.append(self._anchor[0])
        self._anchor = (event, at)

    def collect(self) -> None:
        """Reads the times of what is done, in order; stops at the first that is not."""
        while self._pending:
            first = self._pending.popleft()
            if not isinstance(first, Operation):
                self.give(first)
                continue
            first.span = first.read(self)
            if first.span is None:
                self._pending.appendleft(first)
                return
            self.tell(first)
