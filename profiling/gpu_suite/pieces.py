"""The registry: a piece is a function that checks or times one thing and returns numbers."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

PARTS = ("kernels", "transfer", "engine", "e2e")


class Skip(Exception):
    """A piece cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Context:
    """Where the pieces run. `device` is the torch device of the GPU half: "cuda", or "cpu" when `virtual`."""

    virtual: bool
    device: str
    hardware: str  # hardware file of modelled times
    deadline: float = math.inf  # on `time.monotonic`: a piece starts nothing more behind it, and says what it left out

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Piece:
    part: str
    name: str
    run: Callable[[Context], dict]


PIECES: list[Piece] = []


def piece(part: str) -> Callable:
    """Register a function `(context) -> numbers` under its own name; benchmark rows go into "rows", and a dict of dicts becomes a table
    of its own. A failed check raises AssertionError."""
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; there are {', '.join(PARTS)}")

    def register(function: Callable[[Context], dict]) -> Callable[[Context], dict]:
        PIECES.append(Piece(part, function.__name__, function))
        return function

    return register


def run(piece: Piece, context: Context) -> dict:
    """Run one piece; whatever it raises becomes part of the result, so that the next piece runs."""
    result = {"part": piece.part, "name": piece.name, "status": "ok", "message": "", "numbers": {}, "rows": []}
    start = time.perf_counter()
    try:
        result["numbers"] = dict(piece.run(context))
        result["rows"] = result["numbers"].pop("rows", [])
    except Skip as reason:
        result.update(status="skipped", message=str(reason))
    except Exception as error:  # a piece may fail in any way, a kernel's compiler included
        result.update(status="failed", message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - start, 3)
    return result
