"""VirtualDevice: the engine's operations on CPU tensors, in program order, on a modelled clock.

Each operation takes a start and an end on its lane (GPU stream, transfer channel, CPU workers) from a hardware file's
costs. With tensors it also computes: its GPU half by the references of the Triton kernels, or by the CPU kernels too
(`arithmetic="same"`), its CPU half by the CPU kernels. Without tensors it is the simulator's device. Every time is
modelled, none is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apexk.device import accesses
from apexk.device.base import At, Router, Rows, Running, SpeculativeCopy, Stopped, Ticket
from apexk.device.halves import Halves
from apexk.hardware import Hardware
from apexk.timeline.writer import Timeline

NS = 1e6  # nanoseconds a millisecond


@dataclass(slots=True, eq=False)
class Span:
    """An operation's place on the modelled clock, in ns; also its event. Nobody changes one."""

    start: int
    end: int


class VirtualDevice:
    """`halves` holds the tensors and does the arithmetic; None computes nothing (a simulation).

    `bytes_per_expert` is what a copy moves, for the timeline; its time is the hardware file's, whatever the size.
    """

    name = "virtual"
    modelled = True

    def __init__(self, hardware: Hardware, timeline: Timeline, bytes_per_expert: int, halves: Halves | None = None):
        self.hardware = hardware
        self.timeline = timeline
        self.halves = halves
        self.host_runs_empty = hardware.cpu.fixed_when_empty
        self.sums_in_order = halves is not None and halves.arithmetic == "same"
        self._bytes = bytes_per_expert
        self._free = {"gpu": 0, "side": 0, "h2d": 0, "cpu": 0}
        self._now = 0
        self._queue: deque[SpeculativeCopy] = deque()
        self._underway: tuple[SpeculativeCopy, Span] | None = None  # of the queue: begun, for a layer that is still to come
        self._queued_at = 0
        self._exact_batch: At | None = None
        self._launched: At | None = None

    def begin_layer(self, at: At) -> None:
        self._run("gpu", "attention", at, self.hardware.layer.o_att, names=(accesses.attention,))

    def read_back(self, at: At, rows: Rows) -> Mapping[int, int]:
        loads = self.halves.begin(rows) if rows.loads is None else rows.loads
        routed = self._run("gpu", "route", at, 0.0, tokens=rows.tokens, names=(accesses.route,))
        self._now = max(self._now, routed.end)
        return loads

    def stop_speculation(self, at: At, through: int) -> Stopped:
        landed, running, copy_ns = [], None, round(self.hardware.copy_ms(speculative=True, first=True) * NS)
        while running is None and (self._underway or self._queue):
            if self._underway is None:
                start = max(self._free["h2d"], self._queued_at)
                if start >= self._now:
                    break
                span = Span(start, start + copy_ns)
                self._underway, self._free["h2d"] = (self._queue.popleft(), span), span.end
            copy, span = self._underway
            if span.end <= self._now:
                self._record_copy("copy.spec", at, copy.layer, copy.expert, copy.slot, span)
                landed.append((copy, span))
            elif copy.layer <= through:
                running = Running(copy, (span.end - self._now) / (span.end - span.start), span)
            else:
                break
            self._underway = None
        if self._queue:
            self._queue = deque(copy for copy in self._queue if copy.layer > through)
        return Stopped(landed, running)

    def keep(self, at: At, running: Running) -> Span:
        copy = running.copy
        self._record_copy("copy.spec", at, copy.layer, copy.expert, copy.slot, running.token)
        return running.token

    def abandon(self, at: At, running: Running) -> None:
        copy, span = running.copy, Span(running.token.start, self._now)
        self._free["h2d"] = self._now
        done = round(self._bytes * (1 - running.left))
        self._row("copy.spec", "h2d", at, span, layer=copy.layer, bytes=done, experts=[copy.expert],
                  names=(accesses.copy, copy.layer, copy.expert, copy.slot), abandoned=True)
        if self.halves:
            self.halves.poison(copy.slot)

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Span] = ()) -> Span:
        pairs = sum([loads[e] for e in experts])
        if self.halves and experts:
            self.halves.run_host(at.layer, rows, experts)
        return self._run("cpu", "host.ffn", at, self.hardware.cpu_ms(len(experts), pairs), after, experts=experts, tokens=pairs,
                         names=(accesses.host_ffn, experts, rows.buffer, rows.sides))

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Span] = ()) -> list[Span]:
        end, spans = max(self._now, self._free["h2d"], *[e.end for e in after]), []
        for expert, slot in places.items():
            first, self._exact_batch = self._exact_batch != at, at
            span = Span(end, end + round(self.hardware.copy_ms(speculative=False, first=first) * NS))
            end = self._free["h2d"] = span.end
            self._record_copy("copy.exact", at, at.layer, expert, slot, span)
            spans.append(span)
        return spans

    def run_slots(self, at: At, rows: Rows, slots: Mapping[int, int], loads: Mapping[int, int], kind: str, after: Sequence[Span]) -> Span:
        first, self._launched = self._launched != at, at
        pairs = sum([loads[e] for e in slots])
        if self.halves:
            self.halves.run_slots(rows, slots)
        return self._run("gpu", kind, at, self.hardware.gpu_ms(len(slots), pairs, first), after, experts=slots, tokens=pairs,
                         names=(accesses.slot_ffn, slots, rows.buffer, rows.sides))

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        if self.halves:
            self.halves.divide(rows, split)
        else:
            rows.divide(split)

    def predict(self, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket:
        span = self._run("side", "predict", at, 0.0, tokens=rows.tokens, names=(accesses.predict,))
        return Ticket(span, [self.halves.predict(rows, router) for router in routers] if self.halves and routers else rows.predicted)

    def take_prediction(self, ticket: Ticket):
        return ticket.result

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Span] = ()) -> None:
        self._queue.extendleft(reversed(queue))
        self._queued_at = max([self._now, *(e.end for e in after)])

    def accumulate(self, at: At, rows: Rows, experts: Sequence[int]) -> Span:
        """Takes no time of its own: hardware files know of one merge a layer."""
        if self.halves:
            self.halves.accumulate(rows, experts)
        return self._run("gpu", "combine", at, 0.0, tokens=rows.tokens, names=(accesses.accumulate, experts, rows.start))

    def combine(self, at: At, rows: Rows, experts, out, shared, after: Sequence[Span]) -> Span:
        if self.halves and out is not None:
            self.halves.combine(rows, experts, out, shared)
        ready = max([self._free["gpu"], *[e.end for e in after]])
        excess = (self.hardware.layer.kappa - 1) * (ready - self._now) / NS
        if excess > 0:
            self._run("gpu", "unattributed", at, excess, after)
        names = (accesses.combine_of, rows, experts)
        return self._run("gpu", "combine", at, self.hardware.layer.o_post, after, tokens=rows.tokens, names=names)

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        if self.halves:
            self.halves.fill(layer, expert, slot)

    def synchronize(self) -> None:
        self._now = max(self._now, *self._free.values())

    def channel_wait_ms(self) -> float:
        return max(0, self._free["h2d"] - self._now) / NS

    def done(self, event: Span) -> bool:
        return event.end <= self._now

    def span_ms(self, event: Span) -> tuple[float, float]:
        return event.start / NS, event.end / NS

    def now_ms(self) -> float:
        return self._now / NS

    def close(self) -> None:
        self._queue.clear()
        if self.halves:
            self.halves.close()

    def _run(self, lane: str, kind: str, at: At, ms: float, after: Sequence[Span] = (), **facts) -> Span:
        start = max(self._now, self._free[lane])
        for event in after:
            if event.end > start:
                start = event.end
        end = self._free[lane] = start + round(ms * NS)
        span = Span(start, end)
        if self.timeline.active:
            self._row(kind, lane, at, span, **facts)
        return span

    def _record_copy(self, kind: str, at: At, layer: int, expert: int, slot: int, span: Span) -> None:
        if self.halves:
            self.halves.fill(layer, expert, slot)
        if not self.timeline.active:
            return
        self._row(kind, "h2d", at, span, layer=layer, bytes=self._bytes, experts=[expert], names=(accesses.copy, layer, expert, slot))

    def _row(self, kind: str, lane: str, at: At, span: Span, *, layer: int | None = None, names: tuple = (), **facts) -> None:
        """`names` is a function of `accesses` and its arguments: called only where somebody listens."""
        if not self.timeline.active:
            return
        reads, writes = names[0](*names[1:]) if names else ((), ())
        self.timeline.add(step=at.step, layer=at.layer if layer is None else layer, phase=at.phase, kind=kind, lane=lane,
                          start_ns=span.start, end_ns=span.end, reads=reads, writes=writes, modelled=True, **facts)
