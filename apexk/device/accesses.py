"""What each operation reads and writes, by name; for the timeline's rows and for the ordering check.

`x`, `routing`, `prediction`, `rows` and `out` are buffers that every layer uses again; host blocks belong to their layer, slots
are numbered through the pool. `rows.e7` are the weighted rows of expert 7's pairs; the parts of a long input take turns in `rows0` and `rows1`, in
waves they share `rows2`; `sums128` are the sums of the part from token 128 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from apexk.device.base import WAVES

Names = tuple[list[str], list[str]]  # (reads, writes)


def slot_name(slot: int) -> str:
    return f"slot{slot}"


def attention() -> Names:
    return ["out"], ["x"]


def route() -> Names:
    return ["x"], ["routing"]


def predict() -> Names:
    return ["x"], ["prediction"]


def host_ffn(experts: Iterable[int], buffer: int | None) -> Names:
    return ["x", "routing"], [f"{_rows(buffer)}.e{e}" for e in experts]


def slot_ffn(slots: Mapping[int, int], buffer: int | None) -> Names:
    return ["x", "routing", *(slot_name(s) for s in slots.values())], [f"{_rows(buffer)}.e{e}" for e in slots]


def copy(layer: int, expert: int, slot: int) -> Names:
    return [f"host.L{layer}.e{expert}"], [slot_name(slot)]


def accumulate(experts: Iterable[int], start: int) -> Names:
    return [f"{_rows(WAVES)}.e{e}" for e in experts], [_sums(start)]


def combine(experts: Iterable[int], buffer: int | None, sums: int | None = None) -> Names:
    """`sums` of the part that starts there are added, if any."""
    return [f"{_rows(buffer)}.e{e}" for e in experts] + ([] if sums is None else [_sums(sums)]), ["out"]


def _sums(start: int) -> str:
    return f"sums{start}"


def _rows(buffer: int | None) -> str:
    return "rows" if buffer is None else f"rows{buffer}"
