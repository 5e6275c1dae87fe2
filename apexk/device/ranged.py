"""RangedDevice: the same device with a range around every operation that launches work, for Nsight or torch.profiler.

Only put around a device when a tool listens (`Ranges.active`), so it costs nothing otherwise. Ranges nest as pass, layer,
operation; names and payloads are those of `apexk.nvtx`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch

from apexk.device.base import At, Device
from apexk.nvtx import LAYER, SUBMIT, Ranges, message

#: operation -> kind of its range
KINDS = {"run_host": SUBMIT, "predict": "predict"}


class RangedDevice:
    """`ranges` is called as `ranges(kind, layer, payload)`; see `apexk.nvtx.Ranges`."""

    def __init__(self, inner: Device, ranges: Ranges | TorchRanges):
        self.inner, self._ranges = inner, ranges
        self._merges: list = []  # rows whose merge ends the layer: the whole input, and the last of its parts
        self._open: list[tuple[tuple, int, AbstractContextManager]] = []  # (what, thread, range): the pass, then its layer

    def __getattr__(self, name: str):
        value = getattr(self.inner, name)
        kind = KINDS.get(name)
        if kind is None:
            return value

        def ranged(at: At, *arguments, **more):
            with self._ranges(kind, at.layer, _payload(name, arguments)):
                return value(at, *arguments, **more)

        return ranged

    def begin_layer(self, at: At) -> None:
        wanted = [((at.phase, at.step), at.phase), ((LAYER, at.layer), LAYER)]
        here = [(what, kind) for (what, *_), (_, kind) in zip(self._open, wanted, strict=False)]
        self._close(0 if here[:1] != wanted[:1] else 1 if here != wanted else 2)
        for what, kind in wanted[len(self._open) :]:
            opened = self._ranges(kind, at.layer, at.step)
            opened.__enter__()
            self._open.append((what, threading.get_ident(), opened))
        self.inner.begin_layer(at)

    def read_back(self, at: At, rows) -> dict[int, int]:
        self._merges = [rows, *rows.parts[-1:]]
        with self._ranges("route", at.layer, rows.tokens):
            return self.inner.read_back(at, rows)

    def copy_experts(self, at: At, places, after=()):
        issued = []
        for expert, slot in places.items():  # one by one: a profile then says which expert a transfer moved
            with self._ranges("copy.exact", at.layer, expert):
                issued += self.inner.copy_experts(at, {expert: slot}, after)
        return issued

    def run_slots(self, at: At, rows, slots, loads, kind: str, after):
        with self._ranges(kind, at.layer, len(slots)):
            return self.inner.run_slots(at, rows, slots, loads, kind, after)

    def accumulate(self, at: At, rows, *arguments):
        with self._ranges("combine", at.layer, rows.tokens):
            return self.inner.accumulate(at, rows, *arguments)

    def combine(self, at: At, rows, *arguments, **more):
        with self._ranges("combine", at.layer, rows.tokens):
            merged = self.inner.combine(at, rows, *arguments, **more)
        if any(rows is last for last in self._merges):
            self._close(0 if at.layer == self._ranges.layers - 1 else 1)
        return merged

    def close(self) -> None:
        self._close(0)
        self.inner.close()

    def _close(self, left: int) -> None:
        """Closes the innermost ranges until `left` are open; one that another thread opened (an interrupted pass) is only
        forgotten: a range ends on its own thread or not at all."""
        while len(self._open) > left:
            _, thread, opened = self._open.pop()
            if thread == threading.get_ident():
                opened.__exit__(None, None, None)


class TorchRanges:
    """The same ranges for torch.profiler, which does not see NVTX: `apexk/L07/copy.exact 5`, the payload at the end."""

    def __init__(self, layers: int):
        self.layers = layers

    def __call__(self, kind: str, layer: int, payload: int = 0) -> AbstractContextManager:
        return torch.profiler.record_function(f"apexk/{message(kind, layer)} {payload}")


def _payload(name: str, arguments: tuple) -> int:
    if name == "run_host":
        return len(arguments[1])
    return arguments[0].tokens
