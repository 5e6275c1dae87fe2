"""What `CudaDevice` asks of CUDA, as a protocol: the real one is `cuda_runtime.py` (torch's streams, cupy), the fake one
`native/fake.py` (threads and host memory), on which the device's own code runs without a GPU.

Streams run in order, each beside the others; only events order one after another. As in CUDA, a wait names the event's
latest record at the time of the call, and a wait for an event that was never recorded waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from apexk.device.native.library import CudaApi

NO_MEMORY, NOT_READY = 2, 600  # cudaErrorMemoryAllocation, cudaErrorNotReady


class MissingDevice(RuntimeError):
    """This machine, or this installation, lacks what the device needs."""


class CudaError(RuntimeError):
    """A CUDA call failed; `code` is its cudaError_t (or CUresult), `call` its name."""

    def __init__(self, call: str, code: int, text: str = ""):
        super().__init__(f"{call} failed with CUDA error {code}{f': {text}' if text else ''}")
        self.call, self.code = call, code


class OutOfMemory(CudaError, MemoryError):
    """Device or pinned memory is exhausted; the caller adds what it wanted the memory for."""


class Stream(Protocol):
    handle: int  # cudaStream_t


class Event(Protocol):
    handle: int  # cudaEvent_t


class CudaRuntime(Protocol):
    """One device. Every call but the `synchronize_*` ones returns without waiting for the device. Errors: `CudaError`."""

    name: str
    device: torch.device  # where device tensors are: "cuda:0", on the fake "cpu"
    ordinal: int  # the device's number, for `cudaSetDevice`
    has_stream_memory_operations: bool  # the table's stream_write_value64 and stream_wait_value64 are usable

    def compute_stream(self) -> Stream:
        """The stream that the model's own kernels are launched on (torch's current one)."""

    def new_stream(self, name: str) -> Stream:
        """A stream that does not wait for the legacy default stream; lives until `close`."""

    def new_event(self, timing: bool = False) -> Event:
        """Created once and recorded many times; lives until `close`."""

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Later work of `stream` starts after the event; the host does not wait."""

    def query(self, event: Event) -> bool:
        """Whether the event's latest record is done (True where there is none)."""

    def synchronize_event(self, event: Event) -> None: ...

    def synchronize_stream(self, stream: Stream) -> None: ...

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Between two timing events, both done."""

    def empty_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, freed with the tensor's storage; `OutOfMemory`."""

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Mapped pinned host memory of exactly this size; `OutOfMemory`."""

    def device_address(self, pinned: torch.Tensor) -> int:
        """Where the device sees a tensor of `empty_pinned` or of registered memory."""

    def device_view(self, pinned: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor that kernels on the device read and write; here for a device that sees host memory
        as it is."""
        return pinned

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory that is already there (cudaHostRegister, portable and mapped)."""

    def unregister(self, address: int) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""

    def copy_async(self, dst: int, src: int, nbytes: int, to_device: bool, stream: Stream) -> None:
        """Addresses; the host side pinned."""

    def launch(self, stream: Stream, fn: Callable[[], None]) -> None:
        """`fn` launches kernels with `stream` as torch's current stream. Real: it is called now and its kernels are queued.
        Fake: it *is* the kernel, run by the stream's thread in its turn, so it must read what the host will change
        (lists, counters) before it is made, not when it runs. An exception of it is raised by the next call."""

    def table(self) -> CudaApi:
        """The functions for the native code; valid until `close`."""

    def allocations(self) -> int:
        """Device and pinned allocations, streams and events made so far: constant in steady state."""

    def close(self) -> None:
        """Waits for every stream it made and gives everything back."""
