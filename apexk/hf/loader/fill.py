"""Reads experts from the files straight into the host store, several reads at a time, in the order of the files.

Where the model keeps its experts as the store does and the checkpoint holds them in the same type, a `preadv` puts the
bytes in their place and nothing else touches them. Otherwise one expert's share of a tensor at a time is read,
converted, and copied to its place.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from apexk.hf.inspect import Experts
from apexk.hf.layouts import stored
from apexk.hf.loader.headers import CheckpointError, Stored
from apexk.hf.loader.plan import Piece
from apexk.store.host_store import HostStore

THREADS = 4
BATCH_BYTES = 4 << 20
MOST_BUFFERS = 1024  # of one read; the system's limit


class Reader:
    """Open files; reads parts of stored tensors. Any thread may use it.

    Reads after `close` raise ValueError: a loading that was interrupted leaves threads of the library that still ask for tensors.
    """

    def __init__(self):
        self._open: dict[Path, int] = {}
        self._closed, self._reads = False, 0
        self._changed = threading.Condition()

    def read(self, stored: Stored, begin: int, end: int) -> torch.Tensor:
        """Rows `[begin, end)` along the first dimension, in memory of their own."""
        shape = (end - begin, *stored.shape[1:]) if stored.shape else ()
        tensor = torch.empty(shape, dtype=stored.dtype)
        self.read_into(stored, begin, tensor)
        return tensor

    def read_into(self, stored: Stored, begin: int, tensor: torch.Tensor) -> None:
        """As many rows from `begin` on as `tensor`, contiguous and of the stored type, holds."""
        at = stored.start + begin * (stored.nbytes // max(1, stored.shape[0] if stored.shape else 1))
        self.scatter(stored.file, at, [memoryview(tensor.reshape(-1).view(torch.uint8).numpy())], stored.name)

    def scatter(self, file: Path, at: int, places: list, what: str) -> None:
        """The file's bytes from `at` on into one writable buffer after the other. `what`: named if the file ends before."""
        places = list(places)[::-1]
        with self._opened(file) as descriptor:
            while places:
                count = os.preadv(descriptor, places[: -MOST_BUFFERS - 1 : -1], at)
                if count == 0 and len(places[-1]):
                    raise CheckpointError(f"{file}: cut off in {what} while it was read")
                at += count
                while places and len(places[-1]) <= count:
                    count -= len(places.pop())
                if count:
                    places[-1] = memoryview(places[-1]).cast("B")[count:]

    def close(self) -> None:
        """Waits for reads that other threads are in: a descriptor that is closed under them may be another file's by then."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._reads)
            while self._open:
                os.close(self._open.popitem()[1])

    @contextmanager
    def _opened(self, file: Path) -> Iterator[int]:
        with self._changed:
            if self._closed:
                raise ValueError(f"{file}: its loading has ended, nothing is read from it")
            if file not in self._open:
                self._open[file] = os.open(file, os.O_RDONLY)
            descriptor = self._open[file]
            self._reads += 1
        try:
            yield descriptor
        finally:
            with self._changed:
                self._reads -= 1
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Job:
    """A part of the work: `nbytes` from `start` of `file` go to `address` as they are; or, where that is None, `run()` reads them
    and puts their values in place. `what`: the tensor's name."""

    file: Path
    start: int
    nbytes: int
    what: str
    address: int | None = None
    run: Callable[[], None] | None = None


def fill(store: HostStore, experts: Experts, pieces: list[Piece], reader: Reader, progress: Callable[[int], None]) -> None:
    """Reads every expert into `store`; `progress(bytes)` is called as they come. Raises what the first failing read does."""
    jobs = sorted(_jobs(store, experts, pieces, reader), key=lambda job: (str(job.file), job.start))

    def work(batch: list[Job]) -> int:
        with torch.inference_mode(False), torch.no_grad():
            for run in runs(batch):
                if run[0].address is None:
                    run[0].run()
                else:
                    places = [(ctypes.c_char * job.nbytes).from_address(job.address) for job in run]
                    reader.scatter(run[0].file, run[0].start, places, run[0].what)
        return sum(job.nbytes for job in batch)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="apexk-load") as pool:
        try:
            for nbytes in pool.map(work, batches(jobs)):
                progress(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def runs(batch: list[Job]) -> Iterator[list[Job]]:
    """Jobs that one read serves: they follow each other in the file and need no conversion."""
    run: list[Job] = []
    for job in batch:
        if run and (job.address is None or run[-1].address is None or job.file != run[-1].file or job.start != run[-1].start + run[-1].nbytes):
            yield run
            run = []
        run.append(job)
    if run:
        yield run


def batches(jobs: list[Job]) -> Iterator[list[Job]]:
    """Neighbours together, at least `BATCH_BYTES` of them: a small tensor is not worth a thread's attention."""
    batch, size = [], 0
    for job in jobs:
        batch.append(job)
        size += job.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _jobs(store: HostStore, experts: Experts, pieces: list[Piece], reader: Reader) -> Iterator[Job]:
    views: dict[tuple[int, str], torch.Tensor | None] = {}
    for piece in pieces:
        if (piece.layer, piece.parameter) not in views:
            made = experts.layout.views.get(piece.parameter)
            views[piece.layer, piece.parameter] = made and made(store, piece.layer)
        view = views[piece.layer, piece.parameter]
        for expert in range(store.experts) if piece.expert is None else [piece.expert]:
            yield _job(store, experts, piece, expert, view, reader)


def _job(store: HostStore, experts: Experts, piece: Piece, expert: int, view: torch.Tensor | None, reader: Reader) -> Job:
    """One expert's share of a piece. `view`: what the whole parameter is in the store, if that is one view."""
    tensor, dtype = piece.tensor, store.block.dtype
    first, shares = tensor.first, store.experts if piece.expert is None else 1
    rows = tensor.shape[0] // shares
    at = expert * rows if piece.expert is None else 0
    start, nbytes = first.start + at * (first.nbytes // max(1, tensor.shape[0])), tensor.nbytes // shares
    if view is not None and tensor.kind == "plain" and first.dtype == dtype and _rows_follow(view):
        address = view.data_ptr() + dtype.itemsize * (expert * view.stride(0) + piece.begin * view.stride(1))
        return Job(first.file, start, nbytes, tensor.name, address)

    def run() -> None:
        values = tensor.values(reader.read, dtype, (at, at + rows) if piece.expert is None else None)
        if view is None:
            _put_one(store, experts, piece, expert, values)
        else:
            place = view[expert] if piece.expert is None else view[expert, piece.begin : piece.end]
            place.copy_(values.view(place.shape))

    return Job(first.file, start, nbytes, tensor.name, run=run)


def _rows_follow(view: torch.Tensor) -> bool:
    """Whether one expert's values lie side by side, row by row."""
    return view.stride(-1) == 1 and (view.ndim == 2 or view.stride(1) == view.shape[2])


def _put_one(store: HostStore, experts: Experts, piece: Piece, expert: int, values: torch.Tensor) -> None:
    """One expert of a parameter that no view of the store can be: through the layout, as if there were one expert."""
    layout, parameters = experts.layout, []
    for name, parameter in zip(layout.names, layout.parameters(experts.weights(piece.layer)), strict=True):
        shape = (parameter.shape[0] // store.experts, *parameter.shape[1:])
        parameters.append(values.view(shape) if name == piece.parameter else torch.empty(shape, device="meta"))
    for there, here in zip(stored(store, piece.layer), layout.matrices(parameters, 1), strict=True):
        if here.device.type != "meta":
            there[expert : expert + 1].copy_(here)
