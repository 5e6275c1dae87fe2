"""Pins a host store's memory where it is, in pieces, all of it or none: what the copies from it then are must be one thing."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("apexk.store")

CHUNK_BYTES = 1 << 30  # of one registration: its pages are locked one by one, and an interrupt waits for it


class Registry(Protocol):
    """Pins memory that is already there; both raise RuntimeError."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


@dataclass(frozen=True)
class Pinning:
    """What came of it: `bytes` pinned (all or 0), in `seconds`; `failure` says why not and what to do, else None."""

    bytes: int
    seconds: float
    failure: str | None = None


class Pins:
    """The registrations of one store, by layer."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._addresses: dict[int, list[int]] = {}

    def pin(self, layers: Iterable[tuple[int, int, int]], stride_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Pinning:
        """`layers` are (layer, address, bytes). A chunk ends with a block: no copy touches two registrations. A failure undoes
        what was pinned, is logged, and is no error: copies from unpinned memory are right, and slow."""
        chunk = max(chunk_bytes // stride_bytes, 1) * stride_bytes
        began, layers, done = time.perf_counter(), list(layers), 0
        total = sum(nbytes for *_, nbytes in layers)
        try:
            for layer, address, nbytes in layers:
                for start in range(0, nbytes, chunk):
                    size = min(chunk, nbytes - start)
                    self._registry.register(address + start, size)
                    self._addresses.setdefault(layer, []).append(address + start)
                    done += size
        except (RuntimeError, MemoryError) as error:
            self.release()
            failure = _why(error, done, total)
            log.warning("%s", failure)
            return Pinning(0, time.perf_counter() - began, failure)
        except BaseException:
            self.release()
            raise
        return Pinning(total, time.perf_counter() - began)

    def release(self, layer: int | None = None) -> None:
        """Of one layer, or of all; before its memory goes. May be called again."""
        for key in list(self._addresses) if layer is None else [layer]:
            for address in self._addresses.pop(key, ()):
                self._registry.unregister(address)


def _why(error: Exception, done: int, total: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    return (
        f"the host store is not pinned, so expert copies are slow: registration stopped after {done / 2**30:.2f} of {total / 2**30:.2f} GiB "
        f"({error}). Locked memory is limited to {allowed} (ulimit -l; `ulimit -l unlimited`, or --ulimit memlock=-1 for a container), and "
        f"{_available_gib():.2f} GiB of host memory are available: raise the limit, free memory, or use a smaller model"
    )


def _available_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
