"""What a profiler saw -> timeline rows: device work goes to the range that encloses the call which launched it.

Readers fill three tables (numpy, int64, ns) from their file: ranges of the domain `apexk`, calls into the CUDA API, and
operations on the device. Words and payloads of the ranges are those of `apexk/nvtx.py`. A row is one of
`apexk.timeline/1`; beside the schema's fields it may hold `count` (experts, where their ids are unknown), `stream` and
`thread`.

- An operation belongs to the innermost range, on the thread of its call, that encloses the call.
- The pass (step, phase) is the last one that began before the call.
- Calls of the model's thread outside of an operation's range: `shared` between the routing and the merge of a layer, else
  `attention` of the layer that follows. What comes before the first pass, or is launched by other threads, is left out
  and counted; so are copies to the device that no operation's range encloses (rests of speculative ones, a model's own inputs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from apexk.timeline.schema import PHASES

WORDS = re.compile(r"L(\d+)(?:/([a-z_.]+))?$")
LAYER = "layer"
KERNEL, TO_DEVICE, TO_HOST, OTHER = range(4)  # what an operation on the device is
ACTIVATIONS = ("submit", "host.rows", "host.ffn")  # copies inside these move rows, not experts
ON_HOST = ("route", "host.rows", "host.ffn")  # ranges that are work of their own
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")


class ProfileError(ValueError):
    """A file is no profile of apexk; the message says what was found and what was wanted."""


@dataclass
class Marks:
    """Ranges of the domain, in any order."""

    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    payload: np.ndarray
    words: list[str]
    kind: list[str] = field(init=False)
    layer: np.ndarray = field(init=False)

    def __post_init__(self):
        parsed = {text: parse(text) for text in set(self.words)}
        self.kind = [parsed[text][0] for text in self.words]
        self.layer = np.array([parsed[text][1] for text in self.words], np.int64)

    def where(self, *kinds: str) -> np.ndarray:
        """Indexes of ranges of these kinds, by start."""
        found = np.array([i for i, kind in enumerate(self.kind) if kind in kinds], np.int64)
        return found[np.argsort(self.start[found], kind="stable")]


@dataclass
class Calls:
    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    key: np.ndarray  # correlation, made unique over processes
    sync: np.ndarray  # bool: waits for the device


@dataclass
class Operations:
    start: np.ndarray
    end: np.ndarray
    key: np.ndarray
    what: np.ndarray  # KERNEL, TO_DEVICE, TO_HOST, OTHER
    stream: np.ndarray
    bytes: np.ndarray
    pageable: np.ndarray  # bool: host memory that is not pinned


def parse(words: str) -> tuple[str, int]:
    """Message -> (kind, layer): `decode` -> (decode, -1), `L07` -> (layer, 7), `L07/combine` -> (combine, 7)."""
    if words in PHASES:
        return words, -1
    match = WORDS.match(words)
    return (match[2] or LAYER, int(match[1])) if match else ("", -1)


def rows_of(marks: Marks, calls: Calls, operations: Operations) -> tuple[list[dict], dict]:
    """(rows by start, counts of what is worth knowing: see `findings.py`)."""
    passes = marks.where(*PHASES)
    if not len(passes):
        raise ProfileError("no range `prefill` or `decode` of the domain apexk: was the model swapped under the tool, with passes inside the captured range?")
    rows = _Rows(marks, passes)
    launched = _calls_of(operations, calls)
    owner = _innermost(marks, calls)
    facts = {"operations": len(operations.start), "no_call": int((launched < 0).sum()), "outside": 0, "pageable_copies": 0, "pageable_bytes": 0}
    at = np.where(launched >= 0, launched, 0)
    _device_rows(rows, marks, calls, operations, launched, owner[at] if len(owner) else np.full(len(at), -1), facts)
    _host_rows(rows, marks, device_seen=len(operations.start) > 0)
    facts |= _syncs(marks, calls, owner)
    rows.made.sort(key=lambda row: row["start_ns"])
    return rows.made, facts


class _Rows:
    def __init__(self, marks: Marks, passes: np.ndarray):
        self.made: list[dict] = []
        self.starts = marks.start[passes]
        self.steps = marks.payload[passes].tolist()
        self.phases = [marks.kind[i] for i in passes]
        self._none: list = []  # shared: there may be a million rows

    def pass_at(self, times: np.ndarray) -> np.ndarray:
        """Index of the last pass that began at or before each time, -1 before the first."""
        return np.searchsorted(self.starts, times, side="right") - 1

    def add(self, which: int, layer: int, kind: str, lane: str, start: int, end: int, experts=None, **more) -> None:
        self.made.append({
            "step": self.steps[which], "layer": layer, "phase": self.phases[which], "kind": kind, "lane": lane,
            "start_ns": start, "end_ns": end, "bytes": more.pop("bytes", 0), "experts": self._none if experts is None else experts,
            "tokens": more.pop("tokens", 0), "reads": self._none, "writes": self._none, "modelled": False, **more,
        })  # fmt: skip


def _calls_of(operations: Operations, calls: Calls) -> np.ndarray:
    """Index of the call that launched each operation, -1 where there is none; of several the first."""
    if not len(calls.key):
        return np.full(len(operations.key), -1)
    order = np.lexsort((calls.start, calls.key))
    keys = calls.key[order]
    at = np.searchsorted(keys, operations.key)
    found = np.minimum(at, len(keys) - 1)
    return np.where(keys[found] == operations.key, order[found], -1)


def _innermost(marks: Marks, calls: Calls) -> np.ndarray:
    """Index of the innermost range that encloses each call on its own thread, -1 for none."""
    owner = np.full(len(calls.start), -1)
    for thread in np.unique(calls.thread):
        mine = np.flatnonzero(marks.thread == thread)
        if not len(mine):
            continue
        times, tops = _nesting(mine[np.lexsort((-marks.end[mine], marks.start[mine]))], marks)
        asked = np.flatnonzero(calls.thread == thread)
        at = np.searchsorted(times, calls.start[asked], side="right") - 1
        found = np.where(at >= 0, tops[np.maximum(at, 0)], -1)
        owner[asked] = np.where((found >= 0) & (marks.end[found] >= calls.end[asked]), found, -1)
    return owner


def _nesting(ordered: np.ndarray, marks: Marks) -> tuple[np.ndarray, np.ndarray]:
    """(times, innermost range from each time on) of one thread's ranges, ordered by start, the outer first."""
    times, tops, stack = [], [], []
    starts, ends = marks.start[ordered].tolist(), marks.end[ordered].tolist()

    def close(until):
        while stack and ends[stack[-1]] <= until:
            times.append(ends[stack.pop()])
            tops.append(stack[-1] if stack else -1)

    for i, start in enumerate(starts):
        close(start)
        stack.append(i)
        times.append(start)
        tops.append(i)
    close(float("inf"))
    tops = np.array(tops, np.int64)
    return np.array(times, np.int64), np.where(tops >= 0, ordered[tops], -1)


def _device_rows(rows: _Rows, marks: Marks, calls: Calls, operations: Operations, launched, owner, facts) -> None:
    layers = marks.where(LAYER)
    layer_starts, routes = marks.start[layers], marks.start[marks.where("route")]
    models = set(np.unique(marks.thread[marks.where(*PHASES)]).tolist())
    at = np.where(launched >= 0, launched, 0)
    launch, thread = (calls.start[at], calls.thread[at]) if len(calls.start) else (np.zeros_like(at), np.zeros_like(at))
    which = rows.pass_at(launch)
    following = np.searchsorted(layer_starts, launch)  # the next layer that begins
    route_after = np.searchsorted(routes, launch)
    route_after = np.where(route_after < len(routes), np.append(routes, 0)[np.minimum(route_after, len(routes))], np.iinfo(np.int64).max)
    named: set[int] = set()  # ranges whose payload a row carries already
    columns = (operations.start, operations.end, operations.what, operations.stream, operations.bytes, operations.pageable, launched, owner, thread, which, following, route_after)
    for start, end, what, stream, size, pageable, call, mark, caller, step, after, routed in zip(*(c.tolist() for c in columns), strict=True):
        if call < 0:
            continue
        kind = marks.kind[mark] if mark >= 0 else ""
        layer = int(marks.layer[mark]) if mark >= 0 else -1
        if kind in ("", LAYER, *PHASES):
            if step < 0 or caller not in models or what == TO_DEVICE:
                facts["outside"] += 1
                continue
            if kind == LAYER:
                kind = "attention" if routed < marks.end[mark] else "shared"
            elif after < len(layers):
                kind, layer = "attention", int(marks.layer[layers[after]])
                step = int(rows.pass_at(layer_starts[after : after + 1])[0])
            else:
                facts["outside"] += 1
                continue
        if step < 0:
            facts["outside"] += 1
            continue
        more = {"stream": stream}
        if size:
            more["bytes"] = size
        if kind.startswith("copy."):
            lane, experts = "h2d", [] if mark in named else [int(marks.payload[mark])]
            if pageable and what == TO_DEVICE:
                facts["pageable_copies"] += 1
                facts["pageable_bytes"] += size
        else:
            if what in (TO_DEVICE, TO_HOST) and kind in ACTIVATIONS:
                kind = "host.rows"
            lane = {TO_DEVICE: "h2d", TO_HOST: "cpu"}.get(what, "gpu") if kind == "host.rows" else "side" if kind == "predict" else "gpu"
            experts = None
            if mark not in named and kind.startswith("gpu."):
                more["count"] = int(marks.payload[mark])
            if kind == "combine":
                more["tokens"] = int(marks.payload[mark])
        named.add(mark)
        rows.add(step, layer, "shared" if kind == "submit" else kind, lane, start, end, experts, **more)


def _host_rows(rows: _Rows, marks: Marks, device_seen: bool) -> None:
    """Ranges that are work themselves. In a trace without device work (torch on the CPU) that is every operation's."""
    which = rows.pass_at(marks.start).tolist()
    start, end, thread = marks.start.tolist(), marks.end.tolist(), marks.thread.tolist()
    layer, payload = marks.layer.tolist(), marks.payload.tolist()
    for i, kind in enumerate(marks.kind):
        if which[i] < 0 or kind in ("", LAYER, "submit", *PHASES) or (device_seen and kind not in ON_HOST):
            continue
        more, experts = {}, None
        if kind in ("route", "combine", "predict"):
            more["tokens"] = payload[i]
        elif kind.startswith("copy."):
            experts = [payload[i]]
        elif kind == "host.rows":
            more["bytes"] = payload[i]
        else:
            more["count"] = payload[i]
        rows.add(which[i], layer[i], kind, "cpu" if kind.startswith("host.") else "host", start[i], end[i], experts, thread=thread[i], **more)


def _syncs(marks: Marks, calls: Calls, owner: np.ndarray) -> dict:
    """Waits of the host inside a layer, the routing's own apart."""
    waits = np.flatnonzero(calls.sync & (owner >= 0))
    inside = [i for i in waits.tolist() if marks.kind[owner[i]] not in ("route", *PHASES)]
    return {"syncs_in_layers": len(inside), "sync_ns": int(sum(calls.end[i] - calls.start[i] for i in inside))}
