"""Work spread over processes. Whether the one that asked is interrupted, fails or is killed, none of them is left and none prints."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def spread(work: Callable, items: Sequence, jobs: int, *, fresh: bool = False, chunk: int = 1) -> Iterator:
    """`work(item)` of every item, in order, from `jobs` processes that take `chunk` items at a time.

    `fresh`: they import everything anew, else they start as copies of this one where the system can. Raises what `work` does, and
    `BrokenProcessPool` where one of them was killed.
    """
    method = "spawn" if fresh or "fork" not in multiprocessing.get_all_start_methods() else "fork"
    if method == "spawn":
        resource_tracker.ensure_running()  # it would let SIGINT through again
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(max(1, min(jobs, len(items))), mp_context=multiprocessing.get_context(method), initializer=_follow, initargs=(os.getpid(),)) as pool:
        try:
            with _blocked(signal.SIGINT):  # a terminal sends it to all; processes inherit that they do not hear it
                futures = [pool.submit(_each, work, items[at : at + chunk]) for at in range(0, len(items), chunk)]
            for future in futures:
                yield from future.result()
        except BaseException:
            # nothing is cancelled first: the pool's thread, which tells every open future that the processes are gone, stumbles over cancelled ones
            left = set(multiprocessing.active_children()) - others
            for process in left:
                process.terminate()
            for process in left:
                process.join()
            raise


def _each(work: Callable, items: Sequence) -> list:
    return [work(item) for item in items]


@contextmanager
def _blocked(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(parent: int) -> None:
    """This process ends with `parent`, even if that is killed: a pool's workers would wait for its next word for ever."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # what the other does about it is not for a copy to do
            signal.signal(number, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
