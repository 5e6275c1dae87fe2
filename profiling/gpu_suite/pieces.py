"""The registry: a piece is a function that checks or times one thing and returns numbers."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Piece:
    part: str
    name: str
    run: Callable[[Context], dict]


PIECES: list[Piece] = []


def piece(part: str) -> Callable:
    """Register a function `(context) -> numbers` under its own name. A failed check raises AssertionError."""
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; there are {', '.join(PARTS)}")

    def register(function: Callable[[Context], dict]) -> Callable[[Context], dict]:
        PIECES.append(Piece(part, function.__name__, function))
        return function

    return register


def run(piece: Piece, context: Context) -> dict:
    """Run one piece; whatever it raises becomes part of the result, so that the next piece runs."""
    result = {"part": piece.part, "name": piece.name, "status": "ok", "message": "", "numbers": {}}
    start = time.perf_counter()
    try:
        result["numbers"] = piece.run(context)
    except Skip as reason:
        result.update(status="skipped", message=str(reason))
    except Exception as error:  # a piece may fail in any way, a kernel's compiler included
        result.update(status="failed", message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - start, 3)
    return result
