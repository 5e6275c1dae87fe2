"""What each operation reads and writes, by name; for the timeline's rows and for the ordering check.

`x`, `routing`, `prediction`, `rows` and `out` are buffers that every layer uses again; host blocks belong to their layer, slots
are numbered through the pool. `rows.e7` are the weighted rows of expert 7's pairs; the parts of a long input take turns in `rows0` and `rows1`, in
waves they share `rows2`, and what comes a layer late has `rows3` and `rows4`, with an input of its own; `sums128` are the sums of the part from token 128 on.
Of an expert that is split between the sides, `rows.e7.gpu` and `rows.e7.cpu` are each one's pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from apexk.device.base import LATE, WAVES, Rows

Names = tuple[list[str], list[str]]  # (reads, writes)
Sides = Mapping[int, tuple[str, ...]]  # as `Rows.sides`
NONE: Sides = MappingProxyType({})


def slot_name(slot: int) -> str:
    return f"slot{slot}"


def attention() -> Names:
    return ["out"], ["x"]


def route() -> Names:
    return ["x"], ["routing"]


def predict() -> Names:
    return ["x"], ["prediction"]


def host_ffn(experts: Iterable[int], buffer: int | None, sides: Sides = NONE) -> Names:
    return [f"{_rows(buffer)}.x"] if buffer in LATE else ["x", "routing"], _pairs(experts, buffer, sides)


def host_sums(start: int) -> Names:
    """All experts of a part, their rows added up at once."""
    return ["x", "routing"], [_sums(start)]


def slot_ffn(slots: Mapping[int, int], buffer: int | None, sides: Sides = NONE) -> Names:
    return ["x", "routing", *(slot_name(s) for s in slots.values())], _pairs(slots, buffer, sides)


def copy(layer: int, expert: int, slot: int) -> Names:
    return [f"host.L{layer}.e{expert}"], [slot_name(slot)]


def accumulate(experts: Iterable[int], start: int) -> Names:
    return _pairs(experts, WAVES), [_sums(start)]


def combine(experts: Iterable[int], buffer: int | None, sums: int | None = None, late: tuple[int, Iterable[int]] | None = None,
            sides: Sides = NONE) -> Names:
    """`sums` of the part that starts there are added, if any, and the rows of `late`: (buffer, experts)."""
    added = [] if late is None else _pairs(late[1], late[0])
    return _pairs(experts, buffer, sides) + ([] if sums is None else [_sums(sums)]) + added, ["out"]


def combine_of(rows: Rows, experts: Iterable[int]) -> Names:
    return combine(experts, rows.buffer, rows.start if rows.summed else None, rows.late and (rows.late[0].buffer, rows.late[1]), rows.sides)


def is_late(writes: Iterable[str]) -> bool:
    """Whether an operation fills rows that the next layer adds."""
    return any(name.startswith(tuple(f"{_rows(buffer)}." for buffer in LATE)) for name in writes)


def _pairs(experts: Iterable[int], buffer: int | None, sides: Sides = NONE) -> list[str]:
    rows = _rows(buffer)
    return [f"{rows}.e{e}{side and '.'}{side}" for e in experts for side in sides.get(e, ("",))]


def _sums(start: int) -> str:
    return f"sums{start}"


def _rows(buffer: int | None) -> str:
    return "rows" if buffer is None else f"rows{buffer}"
