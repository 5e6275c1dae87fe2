"""A layer's utilities by `src/utility.cpp`: what `apexk.policy.utility` does in Python, on the same arrays, bit for bit."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from ctypes import addressof, c_int64, create_string_buffer
from struct import Struct, error, pack, unpack_from
from typing import NamedTuple

from .library import load

_STATE = Struct("=4Q2qd")


class State(NamedTuple):
    """Doubles but for `active`, which is int64; `standing` may be None."""

    value: array  # [E]
    active: array  # [E]
    powers: array  # of the decay: [0..]
    standing: array | None = None  # [E]
    weight: float = 0.0  # of it

    def packed(self) -> bytes:
        standing = self.standing.buffer_info()[0] if self.standing is not None else 0
        return _STATE.pack(self.value.buffer_info()[0], self.active.buffer_info()[0], self.powers.buffer_info()[0], standing,
                           len(self.value), len(self.powers), self.weight)


def update(state: State, step: int, loads: Mapping[int, int], logs: bool) -> tuple[float, float, float, float] | None:
    """Adds `loads`, or with `logs` log(1 + load), and returns the sums over the active experts of what was added, y, of y*y, y*u and y*standing. None
    where Python has to do it, with nothing changed."""
    library = load()
    if library is None:
        return None
    count, sums = len(loads), create_string_buffer(32)
    try:
        ids, counts = getattr(loads, "packed", None) or (pack(f"={count}q", *loads), pack(f"={count}q", *loads.values()))
        if library.apexk_utility_update(state.packed(), step, ids, counts, count, logs, sums):
            return None
    except error:  # not numbers of this size
        return None
    return unpack_from("=4d", sums)


def lowest(state: State, step: int, experts: Collection[int], count: int) -> tuple[int, ...] | None:
    """The `count` least useful, at most all. None where Python has to do it."""
    library = load()
    if library is None:
        return None
    size = len(experts)
    chosen = (c_int64 * min(size, count))()
    try:
        if library.apexk_utility_lowest(state.packed(), step, pack(f"={size}q", *experts), size, count, addressof(chosen)):
            return None
    except error:
        return None
    return tuple(chosen)
