"""Files that a command reads: whatever is in one, what goes wrong names it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("apexk")


@contextmanager
def reading(path: str | os.PathLike, what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """What fails inside while `path` is read as `what` (a routing trace) is raised as `kind` with the file's name, since the formats' libraries raise
    anything for a file that is none. The system's own errors, and those that name the file, pass as they are."""
    try:
        yield
    except Exception as error:
        system = isinstance(error, OSError) and error.filename is not None
        if system or isinstance(error, ModuleNotFoundError) or (isinstance(error, (ValueError, RuntimeError)) and str(path) in str(error)):
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise kind(f"{path} is not readable as {what}: {why}") from error


def tell_if_older(library: Path, room: Path, build: str) -> None:
    """A native library that was built before its sources in `room` changed is used all the same: says so, and that `build` builds it."""
    built = library.stat().st_mtime
    newer = [path for folder in ("src", "include") for path in sorted((room / folder).glob("*")) if path.stat().st_mtime > built]
    if newer:
        log.warning("%s is older than %s, so what was changed there is not in it: run `python %s`", library.name, newer[0].name, build)
