"""Expert copies of a CUDA device: what the engine asks for, in the channel's terms, with events, times and book-keeping."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apexk.device import accesses
from apexk.device.base import At, CopyFailed, Running, SpeculativeCopy, Stopped
from apexk.device.cuda_clock import DeviceClock, Operation
from apexk.device.native.channel import Channel, Copy
from apexk.device.runtime import CudaRuntime, Event, Stream
from apexk.device.sm_gather import SmGather
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool
from apexk.timeline.writer import Timeline

log = logging.getLogger("apexk.device")

FIRST_BYTES_PER_MS = 25e6  # of the link, until a copy was timed
NEWEST = 0.2  # weight of the newest copy's rate


class Gate:
    """What the copies of one call start after: an event of its own, which nothing else may record meanwhile."""

    def __init__(self, event: Event, copies: int):
        self.event, self.copies = event, copies


@dataclass(frozen=True)
class Underway:
    """A speculative copy that the channel has, by its tag."""

    at: At
    copy: SpeculativeCopy
    start: Event
    done: Event
    gate: Gate | None


class Copies:
    """`stream` is the channel's; `compute` the one that `after` of speculative copies is recorded on."""

    def __init__(self, runtime: CudaRuntime, channel: Channel, clock: DeviceClock, store: HostStore, pool: Pool, stream: Stream, compute: Stream,
                 timeline: Timeline):
        self._runtime, self._channel, self._clock, self._stream, self._compute, self._timeline = runtime, channel, clock, stream, compute, timeline
        self.bytes = store.block.payload_bytes
        self.gather: SmGather | None = None  # exact copies by a kernel, where that is asked for
        self._sources = [store.addresses(layer).tolist() for layer in range(store.layers)]
        self._targets = pool.addresses().tolist()
        self._loaded, self._loading = runtime.new_event(), False
        self._underway: dict[int, Underway] = {}
        self._owed: Running | None = None  # of the last stop, neither kept nor abandoned
        self._limbo: list[Event] = []  # of copies that were stopped or failed: their records may still be to come
        self._tags = self._operations = 0
        self._bytes_per_ms = FIRST_BYTES_PER_MS

    def exact(self, at: At, places: Mapping[int, int], after: Sequence[Operation]) -> list[Operation | CopyFailed]:
        """One operation for all of them, or for each where a timeline wants to know every copy's times."""
        for earlier in after:
            wait(self._runtime, self._stream, earlier)
        copies = list(places.items())
        groups = [[copy] for copy in copies] if self._timeline.active else [copies]
        return [event for group in groups for event in self._together(at, group)]

    def _together(self, at: At, copies: list[tuple[int, int]]) -> list[Operation | CopyFailed]:
        """(expert, slot) of each: issued between two events."""
        layer, start, end = at.layer, self._clock.take(), self._clock.take()
        sources, targets, nbytes = self._sources[layer], self._targets, self.bytes
        self._operations += 1
        operation = Operation(at, "copy.exact", "h2d", start, end, lambda: self._facts(layer, *copies[0]), number=self._operations, experts=len(copies))
        if self.gather is None:
            errors = self._channel.copy([Copy(0, layer, targets[slot], sources[expert], nbytes, expert=expert) for expert, slot in copies], end, start)
        else:
            errors = self._gather(layer, copies, start, end)
        if not any(errors):
            self._clock.add(operation)
            return [operation] * len(copies)
        operation.experts = errors.count(0)
        if operation.experts:
            self._clock.add(operation)
        else:
            self._limbo += [start, end]
        return [CopyFailed(f"CUDA error {error} for {nbytes} bytes of expert {expert} of layer {layer} into slot {slot}") if error else operation
                for (expert, slot), error in zip(copies, errors, strict=True)]

    def first(self, layer: int, expert: int, slot: int) -> None:
        """A copy that no operation waits for; `settle_first` orders all of them."""
        (error,) = self._channel.copy([Copy(0, layer, self._targets[slot], self._sources[layer][expert], self.bytes)], self._loaded)
        if error:
            raise RuntimeError(f"expert {expert} of layer {layer} could not be copied into slot {slot}: CUDA error {error}")
        self._loading = True

    def settle_first(self) -> None:
        """What comes on the compute stream is after the first residents' copies."""
        if self._loading:
            self._runtime.wait(self._compute, self._loaded)
            self._loading = False

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Operation]) -> None:
        gate = None
        if after:  # operations of the compute stream: its tail is behind them all
            gate = Gate(self._clock.take(), len(queue))
            self._runtime.record(gate.event, self._compute)
        native = []
        for copy in queue:
            underway = Underway(at, copy, self._clock.take(), self._clock.take(), gate)
            native.append(self._copy(copy.layer, copy.expert, copy.slot, underway.start, underway.done, gate and gate.event))
            self._underway[native[-1].tag] = underway
        self._channel.speculate(native)

    def stop(self, at: At, through: int) -> Stopped:
        self.abandon_owed()
        found = self._channel.stop(through)
        if self._limbo:
            past = [event for event in self._limbo if self._runtime.query(event)]
            self._limbo = [event for event in self._limbo if event not in past]
            self._clock.give(*past)
        landed, failed = [], []
        for tag in found.failed:
            underway = self._underway.pop(tag)
            log.warning("layer %d, step %d: the prefetch of expert %d of layer %d failed, CUDA error %d", at.layer, at.step, underway.copy.expert,
                        underway.copy.layer, found.error)
            failed.append(underway.copy)
            self._forget(underway)
        for tag in found.landed:
            underway = self._underway.pop(tag)
            landed.append((underway.copy, self._spoken(underway)))
        running = None
        if found.running is not None:
            tag, left = found.running
            running = self._owed = Running(self._underway[tag].copy, left, tag)
        for tag in self._underway and [t for t, u in self._underway.items() if u.copy.layer <= through and (running is None or t != running.token)]:
            self._forget(self._underway.pop(tag))  # dropped
        return Stopped(landed, running, failed)

    def abandon_owed(self) -> None:
        """The running copy of a stop whose caller was interrupted before it said what to do with it."""
        if self._owed is not None:
            self.abandon(self._underway[self._owed.token].at, self._owed)

    def keep(self, at: At, running: Running) -> Operation:
        self._owed = None
        self._channel.keep(running.token)
        return self._spoken(self._underway.pop(running.token))

    def abandon(self, at: At, running: Running) -> None:
        self._owed = None
        self._channel.abandon(running.token)
        underway = self._underway.pop(running.token)
        now = self._clock.now()
        operation = self._ahead(underway, bytes=round(self.bytes * (1 - running.left)), abandoned=True)
        began = self._clock.ns(underway.start) if self._runtime.query(underway.start) else now  # it may still wait for the link
        operation.span = min(began, now), now
        self._clock.tell(operation)
        self._forget(underway)

    def _gather(self, layer: int, copies: list[tuple[int, int]], start: Event, end: Event) -> list[int]:
        self._runtime.record(start, self._stream)
        self.gather.copy(layer, copies, self._stream)
        self._runtime.record(end, self._stream)
        return [0] * len(copies)

    def reset(self) -> None:
        """A layer was routed: the exact copies of the one before are done."""
        if self.gather is not None:
            self.gather.reset()

    def wait_ms(self) -> float:
        return self._channel.in_flight_bytes() / self._bytes_per_ms

    def learn(self, copy: Operation) -> None:
        """The link's rate from the times of an exact copy."""
        start, end = copy.span
        if end > start:
            self._bytes_per_ms += NEWEST * (copy.experts * self.bytes * 1e6 / (end - start) - self._bytes_per_ms)

    def _spoken(self, underway: Underway) -> Operation:
        """The operation of a speculative copy whose events have been recorded."""
        operation = self._ahead(underway)
        self._close_gate(underway.gate)
        self._clock.add(operation)
        return operation

    def _forget(self, underway: Underway) -> None:
        self._limbo += [underway.start, underway.done]
        self._close_gate(underway.gate)

    def _close_gate(self, gate: Gate | None) -> None:
        if gate is not None:
            gate.copies -= 1
            if not gate.copies:
                self._clock.give(gate.event)

    def _copy(self, layer: int, expert: int, slot: int, start: Event, done: Event, after: Event | None) -> Copy:
        self._tags += 1
        return Copy(self._tags, layer, self._targets[slot], self._sources[layer][expert], self.bytes, done, start, after, expert)

    def _ahead(self, underway: Underway, **facts) -> Operation:
        """The operation of a speculative copy."""
        copy = underway.copy
        return Operation(underway.at, "copy.spec", "h2d", underway.start, underway.done, lambda: self._facts(*copy) | facts)

    def _facts(self, layer: int, expert: int, slot: int) -> dict:
        return {"bytes": self.bytes, "layer": layer, "experts": [expert], "names": (accesses.copy, layer, expert, slot)}


def last_of_all(after: Sequence[Operation]) -> list[Operation]:
    """What stands for `after`: the newest of its exact copies for all of them, since the channel issues them in the order of
    the calls on one stream."""
    exact = [operation for operation in after if operation.kind == "copy.exact"]
    if len(exact) < 2:
        return list(after)
    return [operation for operation in after if operation.kind != "copy.exact"] + [max(exact, key=lambda copy: copy.number)]


def wait(runtime: CudaRuntime, stream: Stream, earlier: Operation) -> None:
    """Later work of `stream` comes after an operation; nothing to do once its times were read."""
    if earlier.end is not None:
        runtime.wait(stream, earlier.end)
