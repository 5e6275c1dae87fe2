"""CudaDevice: the engine's operations on a GPU's streams, the native channel and the native hand-off to the CPU kernels.

Streams, each in order, joined by events alone: `compute` (the model's own), `side` (prediction), `h2d` (expert copies),
`down` (rows to the CPU), `back` (rows from it). What an operation is ordered after without an event, and why:

- At the routing event the host waits for the compute stream, and the merge before it came after everything of its layer.
  So whatever the layers before read or wrote is done when a layer's first operation is asked for, speculative copies
  excepted; and x, ids and weights of this layer are there.
- Copies are ordered among themselves by the channel's stream.

A worker's error is raised by the next call of `run_host` or `combine`, or at `synchronize` or `close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from apexk.device import accesses
from apexk.device.base import (
    WAVES,
    At,
    CopyFailed,
    Router,
    Rows,
    Running,
    SpeculativeCopy,
    Stopped,
    Ticket,
    active_loads,
    with_nobody,
)
from apexk.device.cuda_buffers import Ranks, Shares, StepBuffers, Tables
from apexk.device.cuda_clock import DeviceClock, Operation
from apexk.device.cuda_copies import Copies, last_of_all, wait
from apexk.device.gpu_kernels import GpuKernels
from apexk.device.native.channel import Channel
from apexk.device.native.hand_off import HandOff
from apexk.device.runtime import CudaRuntime, Event, OutOfMemory, Stream
from apexk.device.sm_gather import SmGather
from apexk.kernels.cpu.ffn import HostFFN
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool
from apexk.timeline.writer import Timeline

log = logging.getLogger("apexk.device")

MS = 1e6  # ns a millisecond
Job = tuple[int, tuple[int, ...], torch.Tensor]
DEPTH = 256  # CPU jobs of a layer: one a part of a long input, all asked for before the first is done


@dataclass(eq=False, slots=True)
class HostWork(Operation):
    """CPU experts of one part. `jobs` are the (ticket, experts, ids as the device sees them) of the part that no stream has waited for, its own
    last."""

    hand_off: HandOff | None = None
    jobs: tuple[Job, ...] = ()

    def read(self, clock: DeviceClock) -> tuple[int, int] | None:
        found = self.hand_off.finished(self.jobs[-1][0])
        return None if found is None else (clock.host_ns(found.start_ns), clock.host_ns(found.end_ns))


class CudaDevice:
    """`kernels` launch on `runtime`'s streams; both are the device's own from here on. The store's blocks are copied from where
    they are, pinned or not. `slots` a layer, all in one allocation. Rows for `tokens` tokens of `topk` choices are made at
    once, more when they come. `activation` and `weight_on_input` are the CPU kernels' rule (`kernels` has its own); `how` as
    in `HandOff`; `transfer` as in `ApexConfig`. Raises MemoryError with the numbers.
    """

    name = "cuda"
    modelled = False
    host_runs_empty = False
    sums_in_order = False

    def __init__(self, runtime: CudaRuntime, timeline: Timeline, store: HostStore, slots: int, kernels: GpuKernels, *, topk: int,
                 tokens: int = 32, activation: str = "silu", weight_on_input: bool = False, threads: int | None = None,
                 how: str | None = None, transfer: str = "copy_engine"):
        self.runtime, self.timeline, self.store, self.kernels = runtime, timeline, store, kernels
        block, self._transfer = store.block, transfer
        self._rule = {"intermediate": block.intermediate, "activation": activation, "biases": block.biases, "weight_on_input": weight_on_input}
        self._host_blocks = [with_nobody(store.addresses(layer)) for layer in range(store.layers)]
        self._compute = runtime.compute_stream()
        with ExitStack() as undo:
            undo.callback(runtime.close)
            undo.callback(store.unpin)
            side, h2d, down, back = (runtime.new_stream(name) for name in ("side", "h2d", "down", "back"))
            self._side, self._down, self._back = side, down, back
            self._streams = (self._compute, side, h2d, down, back)
            self.pool = _pool(runtime, store, slots)
            # a read of an unfilled slot must show; the engine synchronizes before it fills the first
            runtime.launch(self._compute, lambda: self.pool.memory.fill_(float("nan")))
            self.ffn = HostFFN(threads=threads)
            undo.callback(self.ffn.close)
            self.hand_off = HandOff(runtime, self.ffn, max_experts=store.experts, depth=DEPTH, how=how)
            undo.callback(self.hand_off.close)
            channel = Channel(runtime, h2d)
            undo.callback(channel.close)
            self.clock = DeviceClock(runtime, self._compute, self._tell)
            self.copies = Copies(runtime, channel, self.clock, store, self.pool, h2d, self._compute, timeline)
            self._tables, self._shares = Tables(runtime, store.experts + 1), Shares(runtime, store.experts)
            self._ranks: dict[int, Ranks] = {}  # by how many layers are predicted
            self._returned = runtime.new_event()
            self._demand = torch.empty(0, dtype=torch.int32)
            self._counts = self._ids = self._demand.view(0, 1)
            self._tokens, self._topk, self._buffers, self._sums = 0, topk, {}, torch.empty(0)
            self._reserve(tokens, topk)
            self._undo, self._open = undo.pop_all(), True
        self._jobs: dict[int, list[Job]] = {}  # by buffer: what no stream waits for
        self._arrived: Event | None = None  # this layer's dense work
        self._merged_ns = self.clock.now()  # end of the last merge that was timed

    def pin(self) -> None:
        """Pins the store, once the weights are there; where that fails it stays as it is, see `info`."""
        pinning = self.store.pin(self.runtime)
        if self._transfer == "sm_gather":
            if pinning.failure is None:
                self.copies.gather = SmGather(self.runtime, self.store, self.pool, self.kernels)
            else:
                self._transfer = "copy_engine, since a kernel cannot read memory that is not pinned"
                log.warning("transfer by %s", self._transfer)

    def begin_layer(self, at: At) -> None:
        if self.runtime.compute_stream().handle != self._compute.handle:
            raise RuntimeError("the model runs on another CUDA stream than when it was swapped; swap it inside the same torch.cuda.stream(...)")
        self.copies.settle_first()
        self._arrived = self.clock.take()
        self.runtime.record(self._arrived, self._compute)

    def read_back(self, at: At, rows: Rows) -> dict[int, int]:
        _check(rows, self.store, self.runtime.device)
        parts, experts, topk = rows.parts or [rows], self.store.experts, rows.topk
        self._reserve(max(part.tokens for part in parts), topk)
        self._whole = rows.tokens
        if (len(parts), rows.tokens) != (len(self._counts), len(self._ids)) or topk != self._ids.shape[1]:
            self._counts, self._ids = self._room_for_demand(len(parts), rows.tokens, topk)
        for number, part in enumerate(parts):
            self.runtime.launch(self._compute, lambda ids=part.topk_ids: self.kernels.count(ids))
            here = self.kernels.demand(part.tokens * topk)
            if len(parts) == 1:  # ids lie behind the counts, there and here
                self._copy_down(self._counts, here, self._compute)
            else:
                self._copy_down(self._counts[number], here[:experts], self._compute)
                self._copy_down(self._ids[part.start], here[experts:], self._compute)
        routed, before = self.clock.take(), self.clock.now()
        self.runtime.record(routed, self._compute)
        self.runtime.synchronize_event(routed)
        self._settle(at, rows, routed, before)
        for part, loads in zip(parts, self._counts, strict=True):
            part.loads = active_loads(loads)
        return part.loads if len(parts) == 1 else active_loads(self._counts.sum(0))

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Operation] = ()) -> HostWork:
        buffer = self._buffer(rows)
        for earlier in after:
            wait(self.runtime, self._down, earlier)
        buffer.stage(rows, self._down)
        ids, seen = rows.host_ids or (self._host_ids(rows), rows.topk_ids)
        ticket = self.hand_off.submit(self._down, buffer.x, self._host_blocks[at.layer], ids, buffer.weights, experts, buffer.host_rows, layer=at.layer,
                                      **self._rule)
        jobs = self._jobs.setdefault(rows.buffer or 0, [])
        jobs.append((ticket, tuple(experts), seen))
        work = HostWork(at, "host.ffn", "cpu", facts=lambda: {"experts": experts, "loads": loads, "names": (accesses.host_ffn, experts, rows.buffer, rows.sides)},
                        hand_off=self.hand_off, jobs=tuple(jobs))
        self.clock.add(work)
        return work

    def run_slots(self, at: At, rows: Rows, slots: Mapping[int, int], loads: Mapping[int, int], kind: str, after: Sequence[Operation]) -> Operation:
        pairs, slot_of = self._buffer(rows).pairs, self._tables.of(slots)
        for earlier in last_of_all(after):
            wait(self.runtime, self._compute, earlier)
        operation = Operation(at, kind, "gpu", facts=lambda: {"experts": slots, "loads": loads, "names": (accesses.slot_ffn, slots, rows.buffer, rows.sides)})
        return self._timed(operation, self._compute, lambda: self.kernels.ffn(
            rows.x, self.pool, rows.topk_ids, rows.topk_weights, slot_of, pairs))

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        self._shares.divide(rows, split, self._host_ids(rows), self._whole, self._compute)

    def predict(self, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket:
        found = self._ranks.get(len(routers))
        if found is None:
            found = self._ranks[len(routers)] = Ranks(self.runtime, len(routers), self.store.experts)

        def run() -> None:
            with torch.no_grad():  # which is a thread's own setting
                for router, ranks in zip(routers, found.here, strict=True):
                    ids, weights = router(rows.x)
                    self.kernels.rank(ids, weights.float(), ranks)

        operation = Operation(at, "predict", "side", facts=lambda: {"tokens": rows.tokens, "names": (accesses.predict,)})
        self._timed(operation, self._side, run, lambda: self.runtime.copy_async(*found.down, False, self._side))
        return Ticket(operation, found)

    def take_prediction(self, ticket: Ticket) -> list[tuple[dict[int, int], dict[int, float]]] | None:
        return ticket.result.read() if self.done(ticket.event) else None

    def accumulate(self, at: At, rows: Rows, experts: Sequence[int]) -> Operation:
        if not rows.summed and len(self._sums) < self._whole:
            self._sums = self.runtime.empty_device((self._whole, self.store.block.hidden), torch.float32)
        pairs, sums, mark = self._buffer(rows).pairs, rows.of(self._sums), self._tables.of(dict.fromkeys(experts, 0))
        before = sums if rows.summed else None  # by now: kernels may be launched later
        operation = Operation(at, "combine", "gpu", facts=lambda: {"tokens": rows.tokens, "names": (accesses.accumulate, experts, rows.start)})
        return self._timed(operation, self._compute, lambda: self.kernels.combine(
            pairs, rows.topk, sums, topk_ids=rows.topk_ids, slot_of=mark, partial=before))

    def combine(self, at: At, rows: Rows, experts: Iterable[int], out: torch.Tensor, shared: torch.Tensor | None, after: Sequence[Operation]) -> Operation:
        pairs = self._buffer(rows).pairs
        for earlier in after:
            if isinstance(earlier, HostWork):
                self._take_rows(rows, earlier, pairs)
            else:
                wait(self.runtime, self._compute, earlier)
        summed, parts = rows.start if rows.summed else None, {}
        if rows.summed:
            parts = {"topk_ids": rows.topk_ids, "slot_of": self._tables.of(dict.fromkeys(experts, 0)), "partial": rows.of(self._sums)}
        operation = Operation(at, "combine", "gpu", facts=lambda: {
            "tokens": rows.tokens, "names": (accesses.combine, experts, rows.buffer, summed, None, rows.sides)})
        return self._timed(operation, self._compute, lambda: self.kernels.combine(pairs, rows.topk, out, shared, **parts))

    def stop_speculation(self, at: At, through: int) -> Stopped:
        return self.copies.stop(at, through)

    def keep(self, at: At, running: Running) -> Operation:
        return self.copies.keep(at, running)

    def abandon(self, at: At, running: Running) -> None:
        self.copies.abandon(at, running)

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Operation] = ()) -> list[Operation | CopyFailed]:
        return self.copies.exact(at, places, after)

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Operation] = ()) -> None:
        self.copies.speculate(at, queue, after)

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        self.copies.first(layer, expert, slot)

    def channel_wait_ms(self) -> float:
        return self.copies.wait_ms()

    def synchronize(self) -> None:
        self.copies.abandon_owed()
        left, self._jobs = self._jobs, {}
        for ticket, *_ in [job for jobs in left.values() for job in jobs]:
            self.hand_off.wait(ticket)  # of an interrupted layer
        for stream in self._streams:
            self.runtime.synchronize_stream(stream)
        self.hand_off.check()
        self.clock.collect()

    def done(self, event: Operation) -> bool:
        return event.span is not None or self.runtime.query(event.end)

    def span_ms(self, event: Operation) -> tuple[float, float] | None:
        if event.span is None:
            self.clock.collect()
        return None if event.span is None else (event.span[0] / MS, event.span[1] / MS)

    def now_ms(self) -> float:
        return self.clock.now() / MS

    def info(self) -> dict:
        """Choices that were made for this machine, for the result."""
        pinning = self.store.pinning
        return {"pinned_bytes": pinning.bytes if pinning else 0, "pin_seconds": pinning.seconds if pinning else None,
                "pin_failure": pinning.failure if pinning else "nobody asked for it", "transfer": self._transfer, "hand_off": self.hand_off.how}

    def close(self) -> None:
        """Waits for what runs. Raises what a worker had to say that nobody was told of; everything is given back all the same."""
        with self._undo:
            self._undo = ExitStack()
            if self._open:
                self._open = False
                self.synchronize()

    def _timed(self, operation: Operation, stream: Stream, launch: Callable[[], None], then: Callable[[], None] | None = None) -> Operation:
        """Puts kernels, and what comes behind them, on a stream between two timing events."""
        operation.start, operation.end = self.clock.take(), self.clock.take()
        self.runtime.record(operation.start, stream)
        self.runtime.launch(stream, launch)
        if then is not None:
            then()
        self.runtime.record(operation.end, stream)
        self.clock.add(operation)
        return operation

    def _take_rows(self, rows: Rows, work: HostWork, pairs: torch.Tensor) -> None:
        """The compute stream goes on once the CPU's rows are among the pairs."""
        for ticket, *_ in work.jobs:
            self.hand_off.join(ticket, self._back)
        self._jobs.pop(rows.buffer or 0)
        host, taken = self._buffer(rows).host_rows_view, {}
        for _, experts, ids in work.jobs:
            taken.setdefault(id(ids), (ids, {}))[1].update(dict.fromkeys(experts, 0))
        for ids, experts in taken.values():  # one but for split experts
            mark = self._tables.of(experts)
            self.runtime.launch(self._back, lambda ids=ids, mark=mark: self.kernels.take_rows(host, ids, mark, pairs))
        self.runtime.record(self._returned, self._back)
        self.runtime.wait(self._compute, self._returned)

    def _settle(self, at: At, rows: Rows, routed: Event, before: int) -> None:
        """The routing event has been waited for: gives back what the layer before used. Times are read later, beside the GPU's work, unless a
        timeline wants the merge's."""
        arrived = 0
        if self.timeline.active:
            self.clock.collect()
            arrived = self.clock.ns(self._arrived)
        self.clock.give(self._arrived)
        self.clock.set_anchor(routed, before)
        if self.timeline.active:
            end = self.clock.ns(routed)
            self._row(at, "attention", "gpu", (min(self._merged_ns, arrived), arrived), {"names": (accesses.attention,)})
            self._row(at, "route", "gpu", (min(arrived, end), end), {"tokens": rows.tokens, "names": (accesses.route,)})
        self._tables.reset()
        self.copies.reset()
        for buffer in self._buffers.values():
            buffer.release()

    def _tell(self, operation: Operation) -> None:
        """An operation's times are known."""
        if operation.kind == "combine":
            self._merged_ns = operation.span[1]
        elif operation.kind == "copy.exact":
            self.copies.learn(operation)
        if self.timeline.active:
            self._row(operation.at, operation.kind, operation.lane, operation.span, operation.facts())

    def _row(self, at: At, kind: str, lane: str, span: tuple[int, int], facts: dict) -> None:
        facts = {"layer": at.layer} | facts
        if "loads" in facts:
            loads, facts["experts"] = facts.pop("loads"), list(facts["experts"])
            facts["tokens"] = sum(map(loads.__getitem__, facts["experts"]))
        name, *arguments = facts.pop("names")
        reads, writes = name(*arguments)
        self.timeline.add(step=at.step, phase=at.phase, kind=kind, lane=lane, start_ns=span[0], end_ns=span[1], reads=reads, writes=writes,
                          modelled=False, **facts)

    def _buffer(self, rows: Rows) -> StepBuffers:
        self._reserve(rows.tokens, rows.topk)  # an input that is run whole though it was split
        number = rows.buffer or 0
        if number not in self._buffers:
            self._buffers[number] = StepBuffers(self.runtime, self._tokens, self._topk, self.store.block.hidden, self.store.block.dtype,
                                                number != WAVES)
        return self._buffers[number].of(rows)

    def _reserve(self, tokens: int, topk: int) -> None:
        """More tokens than ever before: larger buffers. What uses the old ones may go on: the hand-off keeps its jobs' host memory, and
        torch gives device memory on in the compute stream's order, which the merge brought behind the `back` stream's."""
        if tokens <= self._tokens and topk == self._topk:
            return
        self._tokens, self._topk = max(self._tokens, 1 << max(tokens - 1, 0).bit_length()), topk
        self._buffers.clear()
        self.kernels.reserve(self._tokens, topk)

    def _host_ids(self, rows: Rows) -> torch.Tensor:
        return self._ids if rows.buffer is None else self._ids[rows.start : rows.start + rows.tokens]

    def _room_for_demand(self, parts: int, tokens: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer's token loads `[parts, E]` and, behind them, its ids `[tokens, topk]` come to the host."""
        loads, ids = parts * self.store.experts, tokens * topk
        if loads + ids > self._demand.numel():
            self._demand = self.runtime.empty_pinned((1 << (loads + ids - 1).bit_length(),), torch.int32)
        return self._demand[:loads].view(parts, -1), self._demand[loads : loads + ids].view(tokens, topk)

    def _copy_down(self, there: torch.Tensor, here: torch.Tensor, stream: Stream) -> None:
        self.runtime.copy_async(there.data_ptr(), here.data_ptr(), here.nbytes, False, stream)


def _pool(runtime: CudaRuntime, store: HostStore, slots: int) -> Pool:
    shape = (store.layers * slots, store.block.stride)
    wanted = store.layers * slots * store.block.stride_bytes
    try:
        return Pool(shape[0], store.block, runtime.empty_device(shape, store.block.dtype))
    except OutOfMemory as error:
        free, total = runtime.memory_info()
        raise MemoryError(
            f"a pool of {store.layers} layers x {slots} slots x {store.block.stride_bytes} bytes = {wanted / 2**30:.2f} GiB does not fit: "
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free; ask for fewer slots, or for a share of what is free (pool='0.5')"
        ) from error


def _check(rows: Rows, store: HostStore, device: torch.device) -> None:
    shapes = {"x": ((rows.tokens, store.block.hidden), store.block.dtype), "topk_ids": ((rows.tokens, rows.topk), torch.int64),
              "topk_weights": ((rows.tokens, rows.topk), torch.float32)}
    for name, (shape, dtype) in shapes.items():
        tensor = getattr(rows, name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}, wanted a "
                             f"contiguous {dtype} {shape} on {device}")
