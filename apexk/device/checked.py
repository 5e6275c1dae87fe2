"""CheckedDevice: wraps a device and finds the first pair of conflicting accesses that no event orders.

Every lane and the host have a clock; an operation knows what came before it on its lane, what the host knew when it was
asked for, and the events it waits for (vector clocks). Two accesses of one buffer, one of them a write, must be ordered
by that knowledge. The modelled or real times play no part, so a missing wait is found whether or not it happens to bite.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apexk.device import accesses
from apexk.device.base import At, CopyFailed, Device, Router, Rows, Running, SpeculativeCopy, Stopped, Ticket

Clock = dict[str, int]


class OrderError(RuntimeError):
    """Two operations use one buffer and nothing orders them."""


@dataclass(frozen=True)
class Checked:
    """An inner device's event, with everything that is done when it is."""

    inner: Any
    clock: Clock


@dataclass(frozen=True)
class Access:
    what: str  # the operation, for the message
    where: str  # file:line that asked for it
    lane: str
    tick: int  # on its lane


class CheckedDevice:
    """The same device, checked; everything else is passed through."""

    def __init__(self, inner: Device):
        self.inner = inner
        self._lanes: dict[str, Clock] = {lane: {} for lane in ("gpu", "side", "h2d", "cpu", "host")}
        self._written: dict[str, Access] = {}
        self._read: dict[str, dict[str, Access]] = {}  # by lane: a lane's last reader comes after its earlier ones
        self._queue_clock: Clock = {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin_layer(self, at: At) -> None:
        self._run("gpu", f"attention of layer {at.layer}", accesses.attention())
        self.inner.begin_layer(at)

    def read_back(self, at: At, rows: Rows) -> dict[int, int]:
        self._host_learns(self._run("gpu", f"routing of layer {at.layer}", accesses.route()))
        return self.inner.read_back(at, rows)

    def stop_speculation(self, at: At, through: int) -> Stopped:
        stopped = self.inner.stop_speculation(at, through)
        landed = []
        for copy, event in stopped.landed:
            clock = self._speculative(copy)
            self._host_learns(clock)
            landed.append((copy, Checked(event, clock)))
        for copy in stopped.failed:
            self._host_learns(self._speculative(copy))
        running = stopped.running
        if running is not None:
            running = replace(running, token=(running, self._speculative(running.copy)))
        return Stopped(landed, running, stopped.failed)

    def keep(self, at: At, running: Running) -> Checked:
        inner, clock = running.token
        return Checked(self.inner.keep(at, inner), clock)

    def abandon(self, at: At, running: Running) -> None:
        inner, clock = running.token
        self.inner.abandon(at, inner)
        self._host_learns(clock)

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Checked] = ()) -> Checked:
        clock = self._run("cpu", f"CPU experts of layer {at.layer}", accesses.host_ffn(experts, rows.buffer, rows.sides), after)
        return Checked(self.inner.run_host(at, rows, experts, loads, _inner(after)), clock)

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Checked] = ()) -> list[Checked | CopyFailed]:
        clocks = [self._run("h2d", f"exact copy of expert {expert} of layer {at.layer}", accesses.copy(at.layer, expert, slot), after)
                  for expert, slot in places.items()]
        found = self.inner.copy_experts(at, places, _inner(after))
        return [event if isinstance(event, CopyFailed) else Checked(event, clock) for event, clock in zip(found, clocks, strict=True)]

    def run_slots(self, at: At, rows: Rows, slots: Mapping[int, int], loads: Mapping[int, int], kind: str, after: Sequence[Checked]) -> Checked:
        clock = self._run("gpu", f"{kind} of layer {at.layer}", accesses.slot_ffn(slots, rows.buffer, rows.sides), after)
        return Checked(self.inner.run_slots(at, rows, slots, loads, kind, _inner(after)), clock)

    def predict(self, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket:
        clock = self._run("side", f"prediction in layer {at.layer}", accesses.predict())
        ticket = self.inner.predict(at, rows, routers)
        return Ticket(Checked(ticket.event, clock), ticket)

    def take_prediction(self, ticket: Ticket):
        found = self.inner.take_prediction(ticket.result)
        if found is not None:  # the device says that it is there
            self._host_learns(ticket.event.clock)
        return found

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Checked] = ()) -> None:
        self._queue_clock = _join(self._lanes["host"], *(event.clock for event in after))
        self.inner.speculate(at, queue, _inner(after))

    def accumulate(self, at: At, rows: Rows, experts: Sequence[int]) -> Checked:
        clock = self._run("gpu", f"sums of layer {at.layer}", accesses.accumulate(experts, rows.start))
        return Checked(self.inner.accumulate(at, rows, experts), clock)

    def combine(self, at: At, rows: Rows, experts, out, shared, after: Sequence[Checked]) -> Checked:
        names = accesses.combine_of(rows, experts)
        clock = self._run("gpu", f"merge of layer {at.layer}", names, after)
        return Checked(self.inner.combine(at, rows, experts, out, shared, _inner(after)), clock)

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        self._run("host", f"first filling of layer {layer}", accesses.copy(layer, expert, slot))
        self.inner.load_initial(layer, expert, slot)

    def synchronize(self) -> None:
        self.inner.synchronize()
        for lane in tuple(self._lanes):
            self._host_learns(self._lanes[lane])

    def done(self, event: Checked) -> bool:
        done = self.inner.done(event.inner)
        if done:
            self._host_learns(event.clock)
        return done

    def span_ms(self, event: Checked):
        return self.inner.span_ms(event.inner)

    def _speculative(self, copy: SpeculativeCopy) -> Clock:
        """A copy of the queue ran: it knew what the host knew when the queue was handed over."""
        what = f"speculative copy of expert {copy.expert} of layer {copy.layer}"
        return self._run("h2d", what, accesses.copy(copy.layer, copy.expert, copy.slot), host=self._queue_clock)

    def _run(self, lane: str, what: str, names: accesses.Names, after: Sequence[Checked] = (), host: Clock | None = None) -> Clock:
        clock = _join(self._lanes[lane], self._lanes["host"] if host is None else host, *(event.clock for event in after))
        clock[lane] = clock.get(lane, 0) + 1
        access = Access(what, _asked_at(), lane, clock[lane])
        for name in names[0]:
            self._ordered(name, self._written.get(name), access, clock)
            self._read.setdefault(name, {})[lane] = access
        for name in names[1]:
            self._ordered(name, self._written.get(name), access, clock)
            for read in self._read.pop(name, {}).values():
                self._ordered(name, read, access, clock)
            self._written[name] = access
        self._lanes[lane] = clock
        return clock

    def _ordered(self, name: str, first: Access | None, second: Access, clock: Clock) -> None:
        if first is None or first is second or first.tick <= clock.get(first.lane, 0):
            return
        raise OrderError(
            f"{name}: {second.what} on lane {second.lane} ({second.where}) is not ordered after "
            f"{first.what} on lane {first.lane} ({first.where}); it has to wait for that operation's event"
        )

    def _host_learns(self, clock: Clock) -> None:
        self._lanes["host"] = _join(self._lanes["host"], clock)


def _inner(events: Sequence[Checked]) -> list:
    return [event.inner for event in events]


def _join(*clocks: Clock) -> Clock:
    joined: Clock = {}
    for clock in clocks:
        for lane, tick in clock.items():
            if tick > joined.get(lane, 0):
                joined[lane] = tick
    return joined


def _asked_at() -> str:
    """The innermost caller outside this folder."""
    for frame in reversed(traceback.extract_stack(limit=12)):
        if "/device/" not in frame.filename.replace("\\", "/"):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "?"
