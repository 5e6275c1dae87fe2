"""The real CUDA runtime: torch's streams and device memory, cupy's calls for the rest. The only importer of cupy.

The native threads get the addresses of the CUDA functions themselves, from the libraries that torch has loaded. Streams and
events are the driver's, so torch, cupy and the native code may use each other's.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from apexk.device.native.library import CudaApi
from apexk.device.runtime import NO_MEMORY, NOT_READY, CudaError, CudaRuntime, Event, MissingDevice, OutOfMemory, Stream
from apexk.kernels.cuda import build

log = logging.getLogger("apexk.device")

PORTABLE_MAPPED = 3  # of cudaHostAlloc and cudaHostRegister alike
NO_TIMING = 2  # cudaEventDisableTiming
STREAM_MEMORY_OPERATIONS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
#: field of `CudaApi` -> function of the CUDA runtime
FUNCTIONS = {
    "set_device": "cudaSetDevice", "memcpy_async": "cudaMemcpyAsync", "event_create": "cudaEventCreateWithFlags",
    "event_destroy": "cudaEventDestroy", "event_record": "cudaEventRecord", "event_query": "cudaEventQuery",
    "event_synchronize": "cudaEventSynchronize", "stream_wait_event": "cudaStreamWaitEvent", "stream_synchronize": "cudaStreamSynchronize",
    "launch_host_func": "cudaLaunchHostFunc", "get_last_error": "cudaGetLastError",
}  # fmt: skip
DRIVER_FUNCTIONS = {"stream_write_value64": "cuStreamWriteValue64_v2", "stream_wait_value64": "cuStreamWaitValue64_v2"}
TYPES = {torch.float32: "<f4", torch.int32: "<i4", torch.int64: "<i8", torch.uint8: "|u1"}


@dataclass(frozen=True)
class CudaStream:
    handle: int
    torch: torch.cuda.Stream


@dataclass(frozen=True)
class CudaEvent:
    handle: int


class Mapped:
    """Host memory that the device sees, in the form that torch takes a CUDA array in."""

    def __init__(self, pinned: torch.Tensor, address: int):
        self.pinned = pinned  # stays while its view does
        self.__cuda_array_interface__ = {"shape": tuple(pinned.shape), "typestr": TYPES[pinned.dtype], "data": (address, False), "version": 3}


class TorchCuda(CudaRuntime):
    """torch's current CUDA device. Raises RuntimeError that says what is missing."""

    def __init__(self):
        self._cupy = _cupy()
        self._calls = self._cupy.cuda.runtime
        self.ordinal = torch.cuda.current_device()
        self.device = torch.device("cuda", self.ordinal)
        self.name = torch.cuda.get_device_name(self.device)
        self._cudart, self._driver = _libraries()
        self.has_stream_memory_operations = self._attribute(STREAM_MEMORY_OPERATIONS) == 1
        self._api = self._table()
        self._streams: list[CudaStream] = []
        self._events: list[CudaEvent] = []
        self._modules: dict[str, object] = {}
        self._made = 0

    def compute_stream(self) -> Stream:
        stream = torch.cuda.current_stream(self.device)
        return CudaStream(stream.cuda_stream, stream)

    def new_stream(self, name: str) -> Stream:
        stream = torch.cuda.Stream(self.device)
        self._made += 1
        self._streams.append(CudaStream(stream.cuda_stream, stream))
        return self._streams[-1]

    def new_event(self, timing: bool = False) -> Event:
        self._made += 1
        self._events.append(CudaEvent(self._call("eventCreateWithFlags", 0 if timing else NO_TIMING)))
        return self._events[-1]

    def record(self, event: Event, stream: Stream) -> None:
        self._call("eventRecord", event.handle, stream.handle)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("streamWaitEvent", stream.handle, event.handle)

    def query(self, event: Event) -> bool:
        status = self._calls.eventQuery(event.handle)
        if status:
            self._cudart.cudaGetLastError()  # torch would take it for its next kernel's
        if status not in (0, NOT_READY):
            raise CudaError("eventQuery", status)
        return status != NOT_READY

    def synchronize_event(self, event: Event) -> None:
        self._call("eventSynchronize", event.handle)

    def synchronize_stream(self, stream: Stream) -> None:
        self._call("streamSynchronize", stream.handle)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return self._call("eventElapsedTime", start.handle, end.handle)

    def empty_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._made += 1
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory("torch.empty", NO_MEMORY, str(error)) from error

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._made += 1
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        address = self._call("hostAlloc", nbytes, PORTABLE_MAPPED)
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, self._calls.freeHost, address)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def device_address(self, pinned: torch.Tensor) -> int:
        address = ctypes.c_void_p()
        status = self._cudart.cudaHostGetDevicePointer(ctypes.byref(address), ctypes.c_void_p(pinned.data_ptr()), 0)
        if status:
            self._cudart.cudaGetLastError()
            raise CudaError("cudaHostGetDevicePointer", status, f"{pinned.data_ptr():#x} is not pinned")
        return address.value

    def device_view(self, pinned: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(Mapped(pinned, self.device_address(pinned)), device=self.device)

    def register(self, address: int, nbytes: int) -> None:
        self._call("hostRegister", address, nbytes, PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        self._call("hostUnregister", address)

    def memory_info(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def copy_async(self, dst: int, src: int, nbytes: int, to_device: bool, stream: Stream) -> None:
        self._call("memcpyAsync", dst, src, nbytes, 1 if to_device else 2, stream.handle)

    def launch(self, stream: Stream, fn: Callable[[], None]) -> None:
        if torch.cuda.current_stream(self.device).cuda_stream == stream.handle:
            fn()
        else:
            with torch.cuda.stream(stream.torch):
                fn()

    def kernel(self, name: str) -> Callable:
        """A kernel of `apexk.kernels.cuda`, which launches on torch's current stream: see `apexk.kernels.cuda.slots.Kernel`."""
        function = self._module(name).get_function(name)

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[int, ...]) -> None:
            with self._cupy.cuda.ExternalStream(torch.cuda.current_stream(self.device).cuda_stream):
                function(grid, block, tuple(map(self._cupy.uint64, arguments)))  # each is 8 bytes wide

        return launch

    def profiler_start(self) -> None:
        """What comes now is what a profiler records that was told to wait (nsys profile -c cudaProfilerApi)."""
        self._call("profilerStart")

    def profiler_stop(self) -> None:
        self._call("profilerStop")

    def table(self) -> CudaApi:
        return self._api

    def allocations(self) -> int:
        return self._made

    def close(self) -> None:
        for stream in self._streams:
            self.synchronize_stream(stream)
        while self._events:
            self._call("eventDestroy", self._events.pop().handle)
        self._streams.clear()

    def _call(self, name: str, *arguments):
        try:
            return getattr(self._calls, name)(*arguments)
        except self._calls.CUDARuntimeError as error:
            raise (OutOfMemory if error.status == NO_MEMORY else CudaError)(name, error.status, str(error)) from error

    def _module(self, name: str):
        """Compiled ahead of time where nvcc is there or was at installation, else now by cupy."""
        if name not in self._modules:
            major, minor = torch.cuda.get_device_capability(self.device)
            target = 10 * major + minor
            path = build.cubin(name, target)
            if not path.is_file() and build.nvcc():
                path = build.compile_one(name, target).path
            if path.is_file():
                self._modules[name] = self._cupy.RawModule(path=str(path))
            else:
                log.warning("%s is compiled by cupy now: there is no %s, and no nvcc to make it", name, path.name)
                self._modules[name] = self._cupy.RawModule(code=build.source(name).read_text(encoding="utf-8"), options=("-std=c++17",))
        return self._modules[name]

    def _attribute(self, number: int) -> int:
        device, value = ctypes.c_int(), ctypes.c_int()
        for call, *arguments in ((self._driver.cuDeviceGet, ctypes.byref(device), self.ordinal),
                                 (self._driver.cuDeviceGetAttribute, ctypes.byref(value), number, device)):
            status = call(*arguments)
            if status:
                raise CudaError("cuDeviceGetAttribute", status, f"attribute {number}")
        return value.value

    def _table(self) -> CudaApi:
        found = {field: _address(self._cudart, function) for field, function in FUNCTIONS.items()}
        if self.has_stream_memory_operations:
            found |= {field: _address(self._driver, function) for field, function in DRIVER_FUNCTIONS.items()}
        return CudaApi(**found)


def _cupy():
    if not torch.cuda.is_available():
        raise MissingDevice("device 'cuda' needs a GPU: torch sees no CUDA device (a CPU build of torch, no driver, or CUDA_VISIBLE_DEVICES is empty); "
                           "device 'cpu' runs without one")
    try:
        import cupy
    except ImportError as error:
        major = torch.version.cuda.split(".")[0]
        raise MissingDevice(f"device 'cuda' needs cupy: pip install cupy-cuda{major}x (torch is built for CUDA {torch.version.cuda})") from error
    return cupy


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libcudart as torch has loaded it, and the driver's library."""
    names = f"libcudart.so.{torch.version.cuda.split('.')[0]}", "libcuda.so.1"
    try:
        return tuple(ctypes.CDLL(name) for name in names)
    except OSError as error:
        raise MissingDevice(f"device 'cuda' needs {' and '.join(names)}, which torch and the driver bring: {error}") from error


def _address(library: ctypes.CDLL, function: str) -> int:
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value
