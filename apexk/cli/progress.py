"""What a person sees: tables and lines, a progress bar on stderr only on a terminal, and a reader who may leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WIDTH = 30


class Stream:
    """A standard stream whose reader may leave, as `head` does, which is no error: the rest goes nowhere, and files are written all the same."""

    def __init__(self, stream):
        self._stream, self.unheard = stream, False

    @classmethod
    @contextmanager
    def of_each(cls) -> Iterator[None]:
        """In place of `sys.stdout` and `sys.stderr`, where they are open."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (stream and cls(stream) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, do):
        try:
            return do()
        except BrokenPipeError:
            self.unheard = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def bar(label: str):
    """A callable `(done, all)` that redraws one line."""
    if not sys.stderr.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        filled = WIDTH * done // max(total, 1)
        end = "\n" if done == total else ""
        print(f"\r{label} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    return show


def table(rows: list[list[str]]) -> str:
    """Left-aligned first column, right-aligned others."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([r[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True)]).rstrip() for r in rows)


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def told(decode: dict, info: dict) -> str:
    """A run's decode steps in a line, from `handle.summary()["decode"]` and `handle.info()`."""
    if not decode["steps"]:
        return "no decode step"
    experts = "all experts on the CPU" if info["device"] == "cpu" else (
        f"{decode['hits']} of {decode['active']} active experts were resident, {decode['exact']} exact and {decode['speculative']} speculative copies")
    return f"{decode['steps']} decode steps, {decode['ms_per_step']:.2f} ms each ({'modelled on ' if info['modelled'] else ''}{info['hardware']}), {experts}"
