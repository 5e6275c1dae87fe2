"""Reads a timeline and refuses a line that does not follow the schema, with its number."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from apexk.inputs import reading

from .schema import check_header, check_row


class TimelineError(ValueError):
    """A file is not a timeline; the message names file, line and what is wrong."""


@dataclass(frozen=True)
class Recording:
    """A timeline read from a file: the header's facts and the operations in the order recorded."""

    header: dict
    rows: list[dict]


def read(path: str | os.PathLike, *, partial: bool = False) -> Recording:
    """Read `path`. With `partial` a cut last line is left out (the file of a run that was killed)."""
    header, rows = None, []
    with reading(path, "a timeline", TimelineError), open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if partial and not line.endswith("\n"):
                break
            try:
                value = json.loads(line)
                if header is None:
                    check_header(value)
                    header = value
                else:
                    check_row(value)
                    rows.append(value)
            except (ValueError, RecursionError) as error:
                raise TimelineError(f"{path}, line {number}: {_say(error, line)}") from None
    if header is None:
        raise TimelineError(f"{path}: empty, not even a header")
    return Recording(header, rows)


def _say(error: Exception, line: str) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    hint = "" if line.endswith("\n") else "; the line is cut: if its run was killed, read it with partial=True"
    return f"not JSON ({error.msg} at column {error.colno}){hint}"
