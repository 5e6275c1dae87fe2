"""`FakeCuda`: a CUDA runtime without a GPU, for tests and for the latency of the real native code.

Real threads: one a stream. "Device memory" is host memory. Copies take the time of a rate-limited link, operations may be
delayed at random, calls may be made to fail. Nothing it measures says anything about a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from apexk.device.native import library as lib
from apexk.device.runtime import NO_MEMORY, NOT_READY, CudaError, CudaRuntime, Event, OutOfMemory, Stream

CALLS = ("malloc", "malloc_host", "register", "memcpy", "event_create", "event_record", "event_query", "event_synchronize",
         "wait_event", "host_func", "write_value", "wait_value", "launch")  # apexk_fake_call
COUNTERS = ("streams", "events", "allocations", "registrations", "device_bytes", "made", "pageable_copies")  # apexk_fake_counter
HOST_FUNCTION = CFUNCTYPE(None, c_void_p)


class Config(ctypes.Structure):
    """`apexk_fake_config`."""

    _fields_ = [("seed", c_uint64), ("link_bytes_per_s", ctypes.c_double), ("delay_us", c_int32), ("one_callback_thread", c_int32),
                ("memory_bytes", c_uint64), ("eager", c_int32)]


_SIGNATURES = {  # name -> (result, arguments)
    "apexk_fake_start": (c_int32, [POINTER(Config)]),
    "apexk_fake_stop": (None, []),
    "apexk_fake_table": (None, [POINTER(lib.CudaApi)]),
    "apexk_fake_fail": (None, [c_int32, c_int32, c_int32]),
    "apexk_fake_count": (c_int64, [c_int32]),
    "apexk_fake_stream_create": (c_int32, [POINTER(c_void_p)]),
    "apexk_fake_stream_query": (c_int32, [c_void_p]),
    "apexk_fake_event_ns": (c_int32, [c_void_p, POINTER(c_int64)]),
    "apexk_fake_launch": (c_int32, [c_void_p, HOST_FUNCTION, c_void_p]),
    "apexk_fake_malloc": (c_int32, [POINTER(c_void_p), c_uint64]),
    "apexk_fake_malloc_host": (c_int32, [POINTER(c_void_p), c_uint64]),
    "apexk_fake_free": (c_int32, [c_void_p]),
    "apexk_fake_host_register": (c_int32, [c_void_p, c_uint64]),
    "apexk_fake_host_unregister": (c_int32, [c_void_p]),
}
_FROM_TABLE = {  # functions that are called through the table, as the native code calls them
    "memcpy_async": CFUNCTYPE(c_int32, c_void_p, c_void_p, ctypes.c_size_t, c_int32, c_void_p),
    "event_create": CFUNCTYPE(c_int32, POINTER(c_void_p), ctypes.c_uint32),
    "event_record": CFUNCTYPE(c_int32, c_void_p, c_void_p),
    "event_query": CFUNCTYPE(c_int32, c_void_p),
    "event_synchronize": CFUNCTYPE(c_int32, c_void_p),
    "stream_wait_event": CFUNCTYPE(c_int32, c_void_p, c_void_p, ctypes.c_uint32),
    "stream_synchronize": CFUNCTYPE(c_int32, c_void_p),
    "launch_host_func": CFUNCTYPE(c_int32, c_void_p, HOST_FUNCTION, c_void_p),
}


@cache
def _load() -> ctypes.CDLL:
    library = lib.open_library(lib.FAKE)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@dataclass(frozen=True)
class FakeStream:
    handle: int
    name: str


@dataclass(frozen=True)
class FakeEvent:
    handle: int


class FakeCuda(CudaRuntime):
    """See `CudaRuntime`. `link_gb_s`: copies of one direction share it, 0 = as fast as memory. `delay_us`: every second operation
    is delayed by up to this, drawn by `seed`. `memory_bytes`: what `empty_device` can give in all. `memory_operations`: whether
    there are stream memory operations. `one_callback_thread`: host functions of all streams run on one thread, in turn, which
    CUDA may do. `eager`: what finds its stream idle and waits for nothing runs within the call that asks for it, so that timing
    the caller does not time the waking of threads; it wants no rate and no delay. One at a time in a process.
    """

    name = "fake CUDA"
    device = torch.device("cpu")
    ordinal = 0

    def __init__(self, *, seed: int = 0, link_gb_s: float = 0.0, delay_us: int = 0, memory_bytes: int = 1 << 30,
                 memory_operations: bool = True, one_callback_thread: bool = False, eager: bool = False):
        if eager and (link_gb_s or delay_us):
            raise ValueError(f"eager leaves no time for a link of {link_gb_s} GB/s nor for delays of {delay_us} us")
        self._library, self._memory_bytes, self._eager = _load(), memory_bytes, eager
        self.has_stream_memory_operations = memory_operations
        self._api = lib.CudaApi()
        self._library.apexk_fake_table(self._api)
        if not memory_operations:
            self._api.stream_write_value64 = self._api.stream_wait_value64 = None
        for name, signature in _FROM_TABLE.items():
            setattr(self, f"_{name}", signature(getattr(self._api, name)))
        self._kernels: dict[int, Callable[[], None]] = {}  # launched and not yet run
        self._raised: list[BaseException] = []  # by kernels
        self._numbers = itertools.count(1)
        self._trampoline = HOST_FUNCTION(self._run)
        config = Config(seed, link_gb_s * 1e9, delay_us, one_callback_thread, memory_bytes, eager)
        if self._library.apexk_fake_start(config):
            raise RuntimeError("a fake CUDA runtime is running in this process: close it first")
        self._stop = weakref.finalize(self, self._library.apexk_fake_stop)
        self._compute = self.new_stream("compute")

    def compute_stream(self) -> Stream:
        return self._compute

    def new_stream(self, name: str) -> Stream:
        handle = c_void_p()
        self._check("cudaStreamCreate", self._library.apexk_fake_stream_create(byref(handle)))
        return FakeStream(handle.value, name)

    def new_event(self, timing: bool = False) -> Event:
        handle = c_void_p()
        self._check("cudaEventCreate", self._event_create(byref(handle), 0 if timing else 2))
        return FakeEvent(handle.value)

    def record(self, event: Event, stream: Stream) -> None:
        self._check("cudaEventRecord", self._event_record(event.handle, stream.handle))

    def wait(self, stream: Stream, event: Event) -> None:
        self._check("cudaStreamWaitEvent", self._stream_wait_event(stream.handle, event.handle, 0))

    def query(self, event: Event) -> bool:
        status = self._event_query(event.handle)
        if status != NOT_READY:
            self._check("cudaEventQuery", status)
        return status != NOT_READY

    def synchronize_event(self, event: Event) -> None:
        self._check("cudaEventSynchronize", self._event_synchronize(event.handle))

    def synchronize_stream(self, stream: Stream) -> None:
        self._check("cudaStreamSynchronize", self._stream_synchronize(stream.handle))

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return (self.event_ns(end) - self.event_ns(start)) / 1e6

    def event_ns(self, event: Event) -> int:
        """When the event's latest record was done, in ns of `time.perf_counter_ns`."""
        ns = c_int64()
        self._check("cudaEventElapsedTime", self._library.apexk_fake_event_ns(event.handle, byref(ns)))
        return ns.value

    def empty_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._empty("cudaMalloc", self._library.apexk_fake_malloc, shape, dtype)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._empty("cudaHostAlloc", self._library.apexk_fake_malloc_host, shape, dtype)

    def device_address(self, pinned: torch.Tensor) -> int:
        return pinned.data_ptr()

    def register(self, address: int, nbytes: int) -> None:
        self._check("cudaHostRegister", self._library.apexk_fake_host_register(address, nbytes))

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", self._library.apexk_fake_host_unregister(address))

    def memory_info(self) -> tuple[int, int]:
        return self._memory_bytes - self.count("device_bytes"), self._memory_bytes

    def copy_async(self, dst: int, src: int, nbytes: int, to_device: bool, stream: Stream) -> None:
        self._check("cudaMemcpyAsync", self._memcpy_async(dst, src, nbytes, 1 if to_device else 2, stream.handle))

    def launch(self, stream: Stream, fn: Callable[[], None]) -> None:
        if self._eager and self._library.apexk_fake_stream_query(stream.handle) == 0:
            fn()  # as the real runtime calls it, from Python
        else:
            self._queue("kernel launch", self._library.apexk_fake_launch, stream, fn)

    def launch_host_function(self, stream: Stream, fn: Callable[[], None]) -> None:
        """`fn` as a host function: on the callback thread where there is one."""
        self._queue("cudaLaunchHostFunc", self._launch_host_func, stream, fn)

    def table(self) -> lib.CudaApi:
        return self._api

    def allocations(self) -> int:
        return self.count("made")

    def close(self) -> None:
        self._stop()
        self._kernels.clear()

    def fail(self, call: str, after: int = 0, code: int = 999) -> None:
        """The `after`-th next call (0: the next) of one of `CALLS` fails with `code`, once."""
        if call not in CALLS:
            raise ValueError(f"no call {call!r} to fail; there are: {', '.join(CALLS)}")
        self._library.apexk_fake_fail(CALLS.index(call), after, code)

    def count(self, counter: str) -> int:
        """One of `COUNTERS`: what is made and not given back, `made` = ever made, copies whose host side was not pinned."""
        return self._library.apexk_fake_count(COUNTERS.index(counter))

    def _empty(self, call: str, allocate, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        address = c_void_p()
        self._check(call, allocate(byref(address), max(nbytes, 1)))
        memory = (ctypes.c_char * max(nbytes, 1)).from_address(address.value)
        weakref.finalize(memory, self._library.apexk_fake_free, address.value)  # which may be long after the runtime has stopped
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)

    def _queue(self, call: str, launch, stream: Stream, fn: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._kernels[number] = fn
        status = launch(stream.handle, self._trampoline, number)
        if status:
            del self._kernels[number]
        self._check(call, status)

    def _run(self, number: int) -> None:
        try:
            self._kernels.pop(number)()
        except BaseException as error:
            self._raised.append(error)

    def _check(self, call: str, status: int) -> None:
        if self._raised:
            raise self._raised.pop(0)
        if status:
            raise (OutOfMemory if status == NO_MEMORY else CudaError)(call, status)
