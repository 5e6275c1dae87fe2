"""`FakeCuda`: a CUDA runtime without a GPU, for tests and for the latency of the real native code.

Real threads: one a stream. "Device memory" is host memory. Copies take the time of a rate-limited link, operations may be
delayed at random, calls may be made to fail. Nothing it measures says anything about a GPU.
"""

from __future__ import annotations

from apexk.device.runtime import CudaRuntime


class FakeCuda(CudaRuntime):
    """See `CudaRuntime`. `link_gb_s`: copies of one direction share it, 0 = as fast as memory. `delay_us`: each operation is
    delayed by up to this, drawn by `seed`. `memory_bytes`: what `empty_device` can give in all. `memory_operations`: whether
    there are stream memory operations. `one_callback_thread`: host functions of all streams run on one thread, in turn, which
    CUDA may do. One at a time in a process."""

    def __init__(self, *, seed: int = 0, link_gb_s: float = 0.0, delay_us: int = 0, memory_bytes: int = 1 << 30,
                 memory_operations: bool = True, one_callback_thread: bool = False):
        raise NotImplementedError

    def fail(self, call: str, after: int = 0, code: int = 999) -> None:
        """The `after`-th next call (0: the next) of "malloc", "malloc_host", "register", "memcpy", "event_record" … fails, once."""
        raise NotImplementedError

    def live(self) -> dict[str, int]:
        """Streams, events, allocations and registrations made and not given back."""
        raise NotImplementedError
