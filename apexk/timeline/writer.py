"""Records the operations of a run, to a file, in memory, both or neither."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from .schema import SCHEMA, check_decision, check_header, check_words

log = logging.getLogger("apexk.timeline")


class Timeline:
    """`path` is the `timeline.jsonl` to write (None: no file); with `keep` the rows stay in `rows`.

    Lines go to `<path>.partial`, which becomes `path` on `close`: a file of that name is whole. A killed run leaves the
    partial file, readable with `read(..., partial=True)` up to its last full line. Not for use from several threads.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, keep: bool = False):
        self.path = None if path is None else Path(path)
        self.facts: dict | None = None
        self.failed: OSError | None = None  # the first write that did not succeed
        self._kept: list[dict] | None = [] if keep else None
        self._file = None
        if self.path is not None:
            self._partial = self.path.with_name(self.path.name + ".partial")
            self._file = self._open()

    @property
    def active(self) -> bool:
        """Whether `add` records anything; without that a caller need not prepare a decision."""
        return self._file is not None or self._kept is not None

    @property
    def rows(self) -> list[dict]:
        """The rows so far."""
        if self._kept is None:
            raise ValueError("this timeline keeps no rows; make it with Timeline(path, keep=True)")
        return self._kept

    def header(self, **facts) -> None:
        """The run's facts (`schema.HEADER` and more), JSON values; once, before any operation."""
        if self.facts is not None:
            raise ValueError("the timeline already has a header")
        if self._kept:
            raise ValueError("the header comes before the operations")
        facts = {"schema": SCHEMA, **facts}
        check_header(facts)
        self.facts = facts
        self._write(facts)

    def add(
        self,
        *,
        step: int,
        layer: int,
        phase: str,
        kind: str,
        lane: str,
        start_ns: int,
        end_ns: int,
        modelled: bool,
        bytes: int = 0,
        experts: Iterable[int] = (),
        tokens: int = 0,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        **more,
    ) -> None:
        """One operation; fields as in `schema.FIELDS`, `more` holds further JSON values."""
        if not self.active:
            return
        check_words(kind, lane, phase)
        if end_ns < start_ns:
            raise ValueError(f"{kind} of layer {layer} ends before it starts: {start_ns} to {end_ns} ns")
        if kind == "plan":
            check_decision(more.get("decision"))
        row = {
            "step": step, "layer": layer, "phase": phase, "kind": kind, "lane": lane, "start_ns": start_ns, "end_ns": end_ns,
            "bytes": bytes, "experts": list(experts), "tokens": tokens, "reads": list(reads), "writes": list(writes),
            "modelled": modelled, **more,
        }  # fmt: skip
        if self._kept is not None:
            self._kept.append(row)
        if self._file is not None:
            if self.facts is None:
                raise ValueError("a timeline file starts with a header; call header() before the first operation")
            self._write(row)

    def close(self) -> None:
        """Finish the file under its own name, or remove it if there is not even a header. A second call does nothing.

        Raises OSError where a line could not be written: the run went on, the partial file stays as far as it got, and an
        older file of the final name stays as it was.
        """
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()  # flushes
        except OSError as error:
            self.failed = self.failed or error
        if self.failed is not None:
            raise OSError(f"{self.path}: {self.failed.strerror}; what could be written is in {self._partial}") from self.failed
        if self.facts is None:
            self._partial.unlink()
        else:
            os.replace(self._partial, self.path)

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _open(self):
        """The partial file, emptied and locked: two runs into one file would garble it."""
        try:
            file = self._partial.open("a", encoding="utf-8")
        except OSError as error:
            raise OSError(f"timeline {self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise OSError(f"timeline {self.path} is being written by another run: choose another path") from error
        file.truncate(0)
        return file

    def _write(self, value: dict) -> None:
        if self._file is None or self.failed is not None:
            return
        try:
            self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
        except OSError as error:  # a full disk must not stop the run; `close` says it
            self.failed = error
            log.error("timeline %s ends here: %s", self.path, error)
