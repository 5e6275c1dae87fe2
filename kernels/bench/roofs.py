"""What this machine can do at best, measured before anything is compared with it. A percentage always names its roof.

    cpu    host_read (GB/s read), host_fp32 (GFLOP/s of a large float32 product): by as many threads as a case has, or all
    cuda   device_copy (GB/s read plus written), device_read (GB/s), device_bf16, device_fp32 (GFLOP/s), pinned_h2d (GB/s)

Bytes count what memory moves: a copy reads and writes each byte.

A virtual machine's limits change within minutes, with what its neighbours do. So a CPU case is compared with what the machine
did in the same turns (`Beside`), not with what it did when the run began.
"""

import functools
from dataclasses import dataclass

import torch

from .timing import quantiles, times_ns

HOST_BYTES = 256 << 20  # well past the last-level cache
DEVICE_BYTES = 2 << 30
COPY_BYTES = 64 << 20  # a few experts


@dataclass(frozen=True)
class Roof:
    name: str
    value: float
    unit: str  # GB/s or GFLOP/s


@functools.cache
def roof(name) -> Roof:
    """One roof, measured at its first use; the host's by all its threads."""
    if name not in MEASURES:
        raise ValueError(f"roof {name!r} is not known; known: {', '.join(MEASURES)}")
    amount, unit, device, call = MEASURES[name]()
    return Roof(name, *_speed(amount, unit, times_ns(call, device, budget_s=0.5)))


class Beside:
    """The roofs of a CPU case, by its number of threads (None: all of torch's): `calls` take turns with the case's, and `roofs` are made of their times."""

    NAMES = ("host_read", "host_fp32")

    def __init__(self, threads=None):
        self.threads = threads
        self._work = [MEASURES[name]() for name in self.NAMES]
        self.calls = [functools.partial(self._run, call) for *_, call in self._work]

    def _run(self, call):
        if self.threads:
            torch.set_num_threads(self.threads)
        call()

    def roofs(self, times) -> dict[str, Roof]:
        shown = f" x{self.threads}" if self.threads else ""
        speeds = [_speed(amount, unit, taken) for (amount, unit, *_), taken in zip(self._work, times, strict=True)]
        return {name: Roof(name + shown, *speed) for name, speed in zip(self.NAMES, speeds, strict=True)}


def roofs_of(device) -> list[Roof]:
    return [roof(name) for name in MEASURES if name.startswith("host") == (device == "cpu")]


def bound_by(device, dtype, flops, num_bytes, product, beside=None):
    """(roof, least ns): of memory and compute, the roof that allows this task less speed. `beside`: a CPU case's, by name."""
    of = roof if beside is None else beside.__getitem__
    memory = of("host_read" if device == "cpu" else "device_read")
    times = [(num_bytes / memory.value, memory)]
    if product and flops:
        half = dtype != torch.float32
        compute = of("host_fp32" if device == "cpu" else "device_bf16" if half else "device_fp32")
        times.append((flops / compute.value, compute))
    least_ns, name = max(times, key=lambda t: t[0])
    return name, least_ns


def _speed(amount, unit, times_taken):
    # bytes a ns are GB/s, operations a ns are GFLOP/s
    return amount / quantiles(times_taken)["p20_ns"], unit


def _host_read():
    data, out = torch.ones(HOST_BYTES // 4), torch.empty(())
    return HOST_BYTES, "GB/s", "cpu", lambda: torch.sum(data, (0,), out=out)


def _host_fp32():
    n = 1536
    a, b, out = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
    return 2 * n**3, "GFLOP/s", "cpu", lambda: torch.mm(a, b, out=out)


def _device_copy():
    source = torch.ones(DEVICE_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * DEVICE_BYTES, "GB/s", "cuda", lambda: target.copy_(source)


def _device_read():
    data, out = torch.ones(DEVICE_BYTES // 4, device="cuda"), torch.empty((), device="cuda")
    return DEVICE_BYTES, "GB/s", "cuda", lambda: torch.sum(data, (0,), out=out)


def _device_product(dtype):
    n = 8192 if dtype == torch.bfloat16 else 4096
    a, b = (torch.rand(n, n, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3, "GFLOP/s", "cuda", lambda: torch.mm(a, b, out=out)


def _pinned_h2d():
    source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    return COPY_BYTES, "GB/s", "cuda", lambda: target.copy_(source, non_blocking=True)


MEASURES = {
    "host_read": _host_read,
    "host_fp32": _host_fp32,
    "device_copy": _device_copy,
    "device_read": _device_read,
    "device_bf16": lambda: _device_product(torch.bfloat16),
    "device_fp32": lambda: _device_product(torch.float32),
    "pinned_h2d": _pinned_h2d,
}
