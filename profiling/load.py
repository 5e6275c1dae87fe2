"""Any file that says what ran when, as timeline rows: our timeline.jsonl, an nsys sqlite export, a torch.profiler trace."""

from __future__ import annotations

import os

from apexk.inputs import reading
from apexk.timeline import Recording, read

from .read_nsys import is_sqlite, read_nsys
from .read_torch import read_torch


def load(path: str | os.PathLike, *, partial: bool = False) -> Recording:
    """The file's kind is told by its content. Raises OSError, `TimelineError` or `ProfileError` (both ValueError)."""
    with reading(path, "a timeline or a profile"):
        if is_sqlite(path) or str(path).endswith((".nsys-rep", ".qdrep", ".sqlite")):
            return read_nsys(path)
        if _is_trace(path):
            return read_torch(path)
        return read(path, partial=partial)


def _is_trace(path) -> bool:
    """Gzipped, or JSON whose beginning names what such traces begin with; a timeline's first line names its schema."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if head[:2] == b"\x1f\x8b":
        return True
    first = head.lstrip().split(b"\n", 1)[0]
    return b"traceEvents" in head or (head.lstrip()[:1] == b"{" and b"apexk.timeline/" not in first and b"schemaVersion" in head)
