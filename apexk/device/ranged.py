"""RangedDevice: the same device with an NVTX range around every operation that launches work, for Nsight and the like.

Only put around a device when a tool listens (`Ranges.active`), so it costs nothing otherwise. Ranges are named after the
timeline's kinds; the payload is the expert of a copy, the number of experts of an FFN, else the step.
"""

from __future__ import annotations

from apexk.device.base import At, Device
from apexk.nvtx import Ranges

#: operation -> kind of its range
KINDS = {"read_back": "route", "run_host": "host.ffn", "copy_expert": "copy.exact", "predict": "predict", "combine": "combine"}


class RangedDevice:
    def __init__(self, inner: Device, ranges: Ranges):
        self.inner, self._ranges = inner, ranges

    def __getattr__(self, name: str):
        value = getattr(self.inner, name)
        kind = KINDS.get(name)
        if kind is None:
            return value

        def ranged(at: At, *arguments):
            with self._ranges(kind, at.layer, _payload(name, at, arguments)):
                return value(at, *arguments)

        return ranged

    def run_slots(self, at: At, rows, slots, loads, kind: str, after):
        with self._ranges(kind, at.layer, len(slots)):
            return self.inner.run_slots(at, rows, slots, loads, kind, after)


def _payload(name: str, at: At, arguments: tuple) -> int:
    if name == "copy_expert":
        return arguments[0]
    if name == "run_host":
        return len(arguments[1])
    return at.step
