"""`Channel`: expert copies from host blocks into slots, exact ones at once, speculative ones by a native thread in pieces."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from apexk.device.native import library as lib
from apexk.device.runtime import CudaRuntime, Event, Stream

#: bytes of a speculative copy that may be ahead of an exact one: 160 us of a 25 GB/s link
CHUNK_BYTES = 4 << 20
_COPY = Struct("=6Qq3i4x")  # as `lib.NativeCopy`, whose fields take three times as long to set


class Copy(NamedTuple):
    """One expert on its way: addresses, bytes and, of a speculative copy, events. `after` is what must be done before the slot may be written."""

    tag: int  # the caller's name of it, >= 0
    layer: int
    dst: int
    src: int
    nbytes: int
    done: Event | None = None  # recorded behind the last byte
    start: Event | None = None  # a timing event, recorded ahead of the first byte
    after: Event | None = None
    expert: int = 0  # for the NVTX range


class StoppedCopies(NamedTuple):
    """What `stop` found: tags of the copies that have landed and of those that failed since the last stop (what the slots
    of these held is gone), and the running one as (tag, uncopied fraction): it is owed `keep` or `abandon`. `error` is the
    CUDA code of the last failure."""

    landed: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    running: tuple[int, float] | None = None
    error: int = 0


class Channel(lib.Native):
    """The copies of one stream of one device, in one order. Its thread sleeps while there is nothing to issue.

    `capacity`: how many speculative copies may be queued, or landed and not yet reported. Close it before the runtime.
    Calls come from one thread at a time.
    """

    noun = "channel"

    def __init__(self, runtime: CudaRuntime, stream: Stream, *, chunk_bytes: int = CHUNK_BYTES, capacity: int = 4096):
        if chunk_bytes < 1 or capacity < 1:
            raise ValueError(f"chunk_bytes and capacity must be at least 1, got {chunk_bytes} and {capacity}")
        self._library = lib.load()
        self._handle, self._error = ctypes.c_void_p(), ctypes.c_int32()
        self._stopped, self._tags = lib.NativeStopped(), (ctypes.c_int64 * capacity)()
        self._speculative: dict[int, Copy] = {}  # those that the channel has, by tag
        self._copies = (lib.NativeCopy * 1)()
        # before there is a thread: an interrupt may arrive while it starts
        self._close = weakref.finalize(self, _destroy, self._library, self._handle, runtime)
        status = self._library.apexk_channel_create(runtime.table(), runtime.ordinal, stream.handle, chunk_bytes, capacity,
                                                    ctypes.byref(self._handle), ctypes.byref(self._error))
        self._raise_for("starting the transfer channel", status)

    def copy(self, copies: Sequence[Copy], done: Event, start: Event | None = None) -> list[int]:
        """Issues exact copies, in order, now, between two events of all of them. Returns a CUDA error code for each, 0 where it was
        issued; where none was, `done` has not been recorded."""
        native = self._native(copies)
        status = self._library.apexk_channel_copy(self._handle, native, len(copies), start.handle if start else 0, done.handle)
        if status not in (lib.OK, lib.CUDA):
            self._raise_for("copy", status)
        return [copy.error for copy in native[: len(copies)]] if status else [0] * len(copies)

    def speculate(self, queue: Sequence[Copy]) -> None:
        """Queues speculative copies ahead of what is queued already; the one under way is finished first."""
        self._speculative.update((copy.tag, copy) for copy in queue)  # at first: a refused one goes with the next stop
        status = self._library.apexk_channel_speculate(self._handle, self._native(queue), len(queue))
        if status == lib.FULL:
            raise RuntimeError(f"the speculative queue holds {len(self._tags)} copies at most, queued or not yet reported; "
                               f"{len(queue)} more do not fit: make the channel with a larger capacity")
        self._raise_for("speculate", status)

    def stop(self, layer: int) -> StoppedCopies:
        """Drops what has not begun for `layer` and below; copies for later layers go on. Waits for nothing."""
        found = self._stopped
        self._raise_for("stop", self._library.apexk_channel_stop(self._handle, layer, self._tags, ctypes.byref(found)))
        if not self._speculative:
            return StoppedCopies()
        landed, known = found.landed, self._speculative
        tags = tuple(self._tags[: landed + found.failed])
        running = None if found.running < 0 else (found.running, found.left / known[found.running].nbytes)
        dropped = [tag for tag, copy in known.items() if copy.layer <= layer and tag != found.running]
        for tag in {*tags, *dropped}:
            del known[tag]
        return StoppedCopies(tags[:landed], tags[landed:], running, found.error)

    def keep(self, tag: int) -> None:
        """Issues the rest of the running copy; its `done` is recorded when this returns. `CudaError` where a call fails."""
        status = self._library.apexk_channel_keep(self._handle, tag, ctypes.byref(self._error))
        self._speculative.pop(tag, None)
        self._raise_for(f"keeping copy {tag}", status)

    def abandon(self, tag: int) -> None:
        """Issues nothing more of the running copy. Its slot may be the target of a later copy at once."""
        status = self._library.apexk_channel_abandon(self._handle, tag)
        self._speculative.pop(tag, None)
        self._raise_for(f"abandoning copy {tag}", status)

    def in_flight_bytes(self) -> int:
        """Speculative bytes that an exact copy asked for now would wait for; at most `chunk_bytes`."""
        self._raise_if_closed()
        return self._library.apexk_channel_in_flight(self._handle)

    def close(self) -> None:
        """Drops the queue, ends the thread and waits for the stream. May be called again."""
        self._close()

    def _native(self, copies: Sequence[Copy]) -> ctypes.Array:
        """The native descriptions, in an array that grows and is used again."""
        if len(self._copies) < len(copies):
            self._copies = (lib.NativeCopy * len(copies))()
        room, place = self._copies, 0
        for tag, layer, dst, src, nbytes, done, start, after, expert in copies:
            _COPY.pack_into(room, place, dst, src, nbytes, after.handle if after else 0, start.handle if start else 0, done.handle if done else 0, tag, layer, 0, expert)
            place += _COPY.size
        return room


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, runtime: CudaRuntime) -> None:
    """`runtime` is here to outlive the channel."""
    handle_value, handle.value = handle.value, None  # every call refuses a null handle
    library.apexk_channel_destroy(handle_value)
