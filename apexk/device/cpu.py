"""CpuDevice: no GPU at all. Every expert runs in the CPU kernels, on the real clock; there are no slots and no transfers.

Useful by itself on a machine without a GPU, and the only end-to-end time that such a machine can measure.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from apexk.device import accesses
from apexk.device.base import LATE, At, Rows, Running, SpeculativeCopy, Stopped, Ticket
from apexk.device.halves import Halves
from apexk.timeline.writer import Timeline

NS = 1e6  # nanoseconds a millisecond


@dataclass(frozen=True)
class Done:
    """An operation of the calling thread: over when its call returned. Times in ns."""

    start: int
    end: int


class CpuDevice:
    """`halves` must have no slots. Times are this process's, from its start of use. Nothing runs beside the calling thread's
    operators: a shared expert, which the same processors compute, would only be in the experts' way."""

    name = "cpu"
    modelled = False
    host_runs_empty = False
    sums_in_order = True

    def __init__(self, timeline: Timeline, halves: Halves):
        if halves.pool.slots:
            raise ValueError(f"a CPU device has no pool, got one of {halves.pool.slots} slots")
        self.timeline, self.halves = timeline, halves
        self._zero = time.perf_counter_ns()
        self._last_end = 0  # of the layer before

    def begin_layer(self, at: At) -> None:
        self._row("attention", "host", at, self._last_end, self._now(), accesses.attention())

    def read_back(self, at: At, rows: Rows) -> dict[int, int]:
        start = self._now()
        loads = self.halves.begin(rows)
        self._row("route", "host", at, start, self._now(), accesses.route(), tokens=rows.tokens)
        return loads

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Done] = ()) -> Done:
        start = self._now()  # what it comes after is done
        if len(experts) == len(loads) and rows.buffer not in LATE:  # those of a layer late, be they all, are merged after others' sums
            self.halves.run_summed(at.layer, rows, experts)
            names = accesses.host_sums(rows.start)
        else:
            self.halves.run_host(at.layer, rows, experts)
            names = accesses.host_ffn(experts, rows.buffer)
        end = self._now()
        self._row("host.ffn", "cpu", at, start, end, names, experts=list(experts), tokens=sum([loads[e] for e in experts]))
        return Done(start, end)

    def combine(self, at: At, rows: Rows, experts: Iterable[int], out, shared, after: Sequence[Done]) -> Done:
        start = self._now()
        self.halves.combine(rows, experts, out, shared)
        self._last_end = self._now()
        self._row("combine", "host", at, start, self._last_end, accesses.combine_of(rows, experts if rows.pairs is not None else ()), tokens=rows.tokens)
        return Done(start, self._last_end)

    def synchronize(self) -> None:
        self._last_end = self._now()

    def done(self, event: Done) -> bool:
        return True

    def span_ms(self, event: Done) -> tuple[float, float]:
        return event.start / NS, event.end / NS

    def now_ms(self) -> float:
        return self._now() / NS

    def channel_wait_ms(self) -> float:
        return 0.0

    def close(self) -> None:
        self.halves.close()

    # No slots: the engine has nothing to copy, to predict for or to run there.

    def stop_speculation(self, at: At, through: int) -> Stopped:
        return Stopped()

    def keep(self, at: At, running: Running):
        raise RuntimeError("a CPU device has no copies")

    def abandon(self, at: At, running: Running) -> None:
        raise RuntimeError("a CPU device has no copies")

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Done] = ()):
        raise RuntimeError("a CPU device has no slots")

    def run_slots(self, at: At, rows: Rows, slots, loads, kind, after):
        raise RuntimeError("a CPU device has no slots")

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        raise RuntimeError("a CPU device has no slots, so no expert is split")

    def accumulate(self, at: At, rows: Rows, experts):
        raise RuntimeError("a CPU device has no slots")

    def predict(self, at: At, rows: Rows, routers) -> Ticket:
        raise RuntimeError("a CPU device does not predict")

    def take_prediction(self, ticket: Ticket):
        raise RuntimeError("a CPU device does not predict")

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Done] = ()) -> None:
        raise RuntimeError("a CPU device has no slots")

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        raise RuntimeError("a CPU device has no slots")

    def _now(self) -> int:
        return time.perf_counter_ns() - self._zero

    def _row(self, kind: str, lane: str, at: At, start: int, end: int, names: accesses.Names, **facts) -> None:
        self.timeline.add(step=at.step, layer=at.layer, phase=at.phase, kind=kind, lane=lane, start_ns=start, end_ns=end,
                          reads=names[0], writes=names[1], modelled=False, **facts)
