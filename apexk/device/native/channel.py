"""`Channel`: expert copies from host blocks into slots, exact ones at once, speculative ones by a native thread in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from apexk.device.runtime import CudaRuntime, Event, Stream

#: bytes of a speculative copy that may be ahead of an exact one: 160 us of a 25 GB/s link
CHUNK_BYTES = 4 << 20


class Copy(NamedTuple):
    """One expert on its way: addresses, bytes and events. `after` is what must be done before the slot may be written."""

    tag: int  # the caller's name of it, >= 0
    layer: int
    dst: int
    src: int
    nbytes: int
    done: Event  # recorded behind the last byte
    start: Event | None = None  # a timing event, recorded ahead of the first byte
    after: Event | None = None


@dataclass(frozen=True)
class StoppedCopies:
    """What `stop` found. `running` is (tag, uncopied fraction) and owed `keep` or `abandon`; `failed` counts speculative
    copies that failed since the last stop, `error` is the CUDA code of the last of them."""

    landed: tuple[int, ...] = ()
    running: tuple[int, float] | None = None
    failed: int = 0
    error: int = 0


class Channel:
    """The copies of one stream of one device, in one order. Its thread sleeps while there is nothing to issue.

    `capacity`: how many speculative copies may be queued, or landed and not yet reported. Close it before the runtime.
    """

    def __init__(self, runtime: CudaRuntime, stream: Stream, *, chunk_bytes: int = CHUNK_BYTES, capacity: int = 4096):
        raise NotImplementedError

    def copy(self, copies: Sequence[Copy]) -> list[int]:
        """Issues exact copies, in order, now. Returns a CUDA error code for each, 0 where it was issued: only then has its
        `done` been recorded."""
        raise NotImplementedError

    def speculate(self, queue: Sequence[Copy]) -> None:
        """Queues speculative copies ahead of what is queued already; the one under way is finished first."""
        raise NotImplementedError

    def stop(self, layer: int) -> StoppedCopies:
        """Drops what has not begun for `layer` and below; copies for later layers go on. Waits for nothing."""
        raise NotImplementedError

    def keep(self, tag: int) -> None:
        """Issues the rest of the running copy; its `done` is recorded when this returns. `CudaError` where a call fails."""
        raise NotImplementedError

    def abandon(self, tag: int) -> None:
        """Issues nothing more of the running copy. Its slot may be the target of a later copy at once."""
        raise NotImplementedError

    def in_flight_bytes(self) -> int:
        """Speculative bytes that an exact copy asked for now would wait for; at most `chunk_bytes`."""
        raise NotImplementedError

    def close(self) -> None:
        """Drops the queue, ends the thread and waits for the stream. May be called again."""
        raise NotImplementedError
