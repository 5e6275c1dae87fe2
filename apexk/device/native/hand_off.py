"""`HandOff`: CPU experts started when a stream's rows are there and waited for by a stream, without Python between."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch

from apexk.device.native import library as lib
from apexk.device.runtime import CudaRuntime, Stream
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.library import status_text as worker_text

log = logging.getLogger("apexk.device")

HOW = ("flags", "host functions")  # apexk_hand_off_create's `how`
FLAGS_BYTES = 128  # for each of `depth` jobs
_CLOSE_US = 10_000_000  # a stream that works is done by then
_SLICE_US = 50_000  # how long a wait goes without looking for an interrupt


class HandOffError(RuntimeError):
    """The CPU kernels refused or failed; the rows of `out` were not written."""


class Finished(NamedTuple):
    """When a job's rows were seen to be there and when its results were, in ns of `time.perf_counter_ns`."""

    start_ns: int
    end_ns: int


class HandOff(lib.Native):
    """Jobs for `ffn`'s threads that begin and end on streams, in the order of `submit`. `how`: "flags" (stream memory
    operations), "host functions", or None: flags where the runtime has them. At most `depth` jobs are outstanding. Calls
    come from one thread at a time. Close it before `ffn` and the runtime.
    """

    noun = "hand-off"

    def __init__(self, runtime: CudaRuntime, ffn: HostFFN, *, max_experts: int, depth: int = 8, how: str | None = None):
        if how is not None and how not in HOW:
            raise ValueError(f"how is {how!r}; there are: {', '.join(map(repr, HOW))}, or None")
        if how == "flags" and not runtime.has_stream_memory_operations:
            raise ValueError(f"how is 'flags', but {runtime.name} has no stream memory operations: use 'host functions'")
        if depth < 1 or max_experts < 1:
            raise ValueError(f"depth and max_experts must be at least 1, got {depth} and {max_experts}")
        self.how = how or HOW[not runtime.has_stream_memory_operations]
        self.depth, self.max_experts = depth, max_experts
        self._library, self._ffn = lib.load(), ffn
        self._handle, self._error, self._ticket = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_uint64()
        self._worker, self._start, self._end = ctypes.c_int32(), ctypes.c_int64(), ctypes.c_int64()
        self._described: tuple = ((object(),), None)  # tensors and options of the newest job, and their native description
        self._buffers: dict[int, tuple] = {}  # what outstanding jobs read and write, by ticket
        self._joined: dict[int, Stream] = {}  # by handle: they may still look at a flag when its job is done
        flags = runtime.empty_pinned((FLAGS_BYTES * depth,), torch.uint8)
        # before there is a thread: an interrupt may arrive while it starts
        self._close = weakref.finalize(self, _destroy, self._library, self._handle, runtime, self._joined, (ffn, flags, self._buffers))
        status = self._library.apexk_hand_off_create(
            runtime.table(), lib.CpuQueue(*ffn.native_queue()), HOW.index(self.how), flags.data_ptr(), runtime.device_address(flags),
            depth, max_experts, ctypes.byref(self._handle), ctypes.byref(self._error))
        self._raise_for("starting the CPU hand-off", status)

    def submit(self, rows: Stream, x: torch.Tensor, blocks: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
               experts: Sequence[int], out: torch.Tensor, *, intermediate: int, activation: str = "silu", biases: bool = False,
               weight_on_input: bool = False, summed: bool = False, layer: int = 0) -> int:
        """As `HostFFN.submit`, once all that is now on the stream `rows` is done (so the copies into x, topk_ids and
        topk_weights, which are pinned, have been put there; tensors keep their shapes). `layer` names the NVTX range. Returns a ticket. Raises
        `HandOffError` for an earlier job."""
        self.check()
        if len(experts) > self.max_experts:
            raise ValueError(f"{len(experts)} experts for one job; this hand-off was made for at most {self.max_experts}")
        given = (x, topk_ids, topk_weights, out, intermediate, activation, biases, weight_on_input, summed)
        if not all(map(is_, given, self._described[0])):  # layer after layer a caller's buffers are the same
            self._described = given, self._ffn.describe(*given)
        call, keep = self._ffn.complete(self._described[1], blocks, experts)
        status = self._library.apexk_hand_off_submit(self._handle, call, rows.handle, layer, ctypes.byref(self._ticket), ctypes.byref(self._error))
        if status == lib.FULL:
            raise RuntimeError(f"{self.depth} CPU jobs are outstanding and none has been waited for: make the hand-off with a larger depth")
        self._raise_for("handing rows to the CPU", status)
        ticket = self._ticket.value
        self._buffers[ticket] = (*keep, *given[:4])
        self._buffers.pop(ticket - self.depth, None)  # its place in the ring was free
        return ticket

    def join(self, ticket: int, stream: Stream) -> None:
        """What is put on `stream` from now on runs after the job. Once for each ticket. Raises `HandOffError` for an earlier job."""
        self.check()
        self._joined[stream.handle] = stream
        self._raise_for("waiting for the CPU", self._library.apexk_hand_off_join(self._handle, ticket, stream.handle, ctypes.byref(self._error)))

    def wait(self, ticket: int) -> Finished:
        """Blocks the host until the job is done (an interrupt gets through); `HandOffError` where it failed and nobody was told yet."""
        while True:
            found = self._look(ticket, _SLICE_US)
            if found is not None:
                return found

    def finished(self, ticket: int) -> Finished | None:
        """The job's times, or None while it is under way; never waits. Known for the last `depth` tickets."""
        return self._look(ticket, 0)

    def check(self) -> None:
        """Raises `HandOffError` for the first failed job that nobody was told of yet. Never waits."""
        if self._library.apexk_hand_off_failure(self._handle, ctypes.byref(self._ticket), ctypes.byref(self._worker)) == lib.WORKER:
            self._fail(self._ticket.value, self._worker.value)
        self._raise_if_closed()

    def close(self) -> None:
        """Waits for outstanding jobs and for the streams that joined them, and ends the thread. May be called again."""
        self._close()

    def _look(self, ticket: int, timeout_us: int) -> Finished | None:
        status = self._library.apexk_hand_off_wait(self._handle, ticket, timeout_us, ctypes.byref(self._worker), ctypes.byref(self._start),
                                                   ctypes.byref(self._end))
        if status == lib.NOT_DONE:
            return None
        if status == lib.WORKER:
            self.check()  # tells of it, once; its times are known all the same
        else:
            self._raise_for(f"job {ticket}", status)
        return Finished(self._start.value, self._end.value)

    def _fail(self, ticket: int, worker: int) -> None:
        raise HandOffError(f"CPU job {ticket}: {worker_text(worker)}; its rows were not written")


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, runtime: CudaRuntime, joined: dict[int, Stream], outlive: tuple) -> None:
    """`outlive`: what the jobs, the thread and the streams use."""
    handle_value, handle.value = handle.value, None  # every call refuses a null handle
    if library.apexk_hand_off_destroy(handle_value, _CLOSE_US) == lib.NOT_DONE:
        _LEFT.append((runtime, *outlive))
        log.error("CPU jobs were still outstanding %d s after the hand-off was closed: a stream failed or hangs; their memory is kept",
                  _CLOSE_US // 1_000_000)
        return
    try:
        for stream in joined.values():
            runtime.synchronize_stream(stream)
    except RuntimeError as error:  # the runtime is closed or broken: nobody can tell whether a stream still looks at a flag
        _LEFT.append((runtime, *outlive))
        log.error("the streams that waited for CPU jobs could not be waited for (%s); their memory is kept", error)


_LEFT: list[tuple] = []
