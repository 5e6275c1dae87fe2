"""Decisions by `src/scan.cpp`: the same plans as the Python of `apexk.policy.scan`, bit for bit, in a fraction of the time."""

from __future__ import annotations

import ctypes
import threading
from struct import Struct, error, pack, unpack_from

from ..cost_affine import AffineCosts
from ..cost_rates import RateCosts
from ..types import Plan, RouteView
from .library import load

_REQUEST = Struct("=11d9q")
_ANSWER = Struct("=2d3q")
_PAIR = Struct("=2d")


class _Room(threading.local):
    """Where a thread's answers come."""

    experts = -1

    def of(self, experts: int) -> ctypes.Array:
        if experts > self.experts:
            self.memory, self.experts = ctypes.create_string_buffer(_ANSWER.size + 8 * experts + _PAIR.size * (experts + 1)), experts
        return self.memory


_room = _Room()


def decide(view: RouteView, limit: int | None = None, *, slots: int = 0, scratch: int = 0, gain: float = 0.0, spills: bool = False) -> Plan | None:
    """`scan.choose`, then waves through up to `scratch` of `slots` slots that must gain the share `gain` (none where either is 0), then `scan.spill` if
    `spills`. None where Python has to do it: the library is not built, costs are of another kind than these two, or the view is refused."""
    library, costs = load(), view.costs
    if library is None:
        return None
    if type(costs) is AffineCosts:
        prices = costs.c0, costs.a, costs.b, costs.s0, costs.t1, costs.g0, costs.g1, costs.g2
        rates, when_empty = 0, costs.cpu_fixed_when_empty
    elif type(costs) is RateCosts:
        prices, rates, when_empty = (costs.cpu, 0.0, 0.0, costs.copy, 0.0, costs.gpu, 0.0, 0.0), 1, 0
    else:
        return None
    running, loads, resident = view.in_flight, view.loads, view.resident
    expert, left = (-1, 0.0) if running is None else (running.expert, running.left)
    count = len(loads)
    if running is not None and expert < 0:
        return None
    try:
        ids, pairs = getattr(loads, "packed", None) or (pack(f"={count}q", *loads), pack(f"={count}q", *loads.values()))
        request = _REQUEST.pack(*prices, view.channel_wait_ms, left, 1 - gain, rates, when_empty, view.resident_first, expert, view.available,
                                -1 if limit is None else max(limit, 0), slots, scratch, spills)
        residents = pack(f"={len(resident)}q", *resident)
    except error:  # not numbers of this size
        return None
    answer = _room.of(count)
    if library.apexk_scan(request, count, ids, pairs, len(resident), residents, answer):
        return None
    cpu, gpu, here, copied, estimates = _ANSWER.unpack_from(answer)
    start = _ANSWER.size
    behind = start + 8 * count
    return Plan(
        unpack_from(f"={here}q", answer, start),
        unpack_from(f"={copied}q", answer, start + 8 * here),
        unpack_from(f"={count - here - copied}q", answer, start + 8 * (here + copied)),
        cpu, gpu, tuple(_PAIR.iter_unpack(memoryview(answer)[behind : behind + _PAIR.size * estimates])),
    )
