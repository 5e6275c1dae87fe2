"""Reads a trace that torch.profiler exported (Kineto's Chrome JSON, plain or gzipped) as timeline rows.

torch does not see NVTX, so the ranges are the `record_function`s of `apexk.device.ranged.TorchRanges`:
`apexk/L07/copy.exact 5`. Times are microseconds with three decimals; they are taken as decimals, so that every ns is exact.
Without device activity (torch on the CPU) the ranges themselves are the rows.
"""

from __future__ import annotations

import gzip
import json
import os
from decimal import Decimal

import numpy as np

from apexk.timeline import SCHEMA, Recording

from .attribution import KERNEL, OTHER, SYNCS, TO_DEVICE, TO_HOST, Calls, Marks, Operations, ProfileError, rows_of

PREFIX = "apexk/"
CALLS = ("cuda_runtime", "cuda_driver")
OPERATIONS = ("kernel", "gpu_memcpy", "gpu_memset")


def read_torch(path: str | os.PathLike) -> Recording:
    """Rows of a trace. Raises `ProfileError` for a file that is none or has no range of apexk."""
    trace = _load(path)
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    threads: dict[tuple, int] = {}
    marks = _marks(spans, threads)
    if not marks.words:
        raise ProfileError(f"{path} has no range that begins with {PREFIX!r}: run under `apexk profile`, or wrap the device in TorchRanges")
    calls = [event for event in spans if event.get("cat") in CALLS and "correlation" in event.get("args", {})]
    rows, facts = rows_of(marks, _calls(calls, threads), _operations([e for e in spans if e.get("cat") in OPERATIONS]))
    facts["overhead_ns"] = sum(_ns(event["dur"]) for event in spans if event.get("cat") == "overhead")
    devices = [device.get("name", "") for device in trace.get("deviceProperties", [])]
    return Recording({"schema": SCHEMA, "versions": {"kineto schema": trace.get("schemaVersion")}, "model": {}, "config": {},
                      "hardware": "measured by torch.profiler", "device": ", ".join(filter(None, devices)) or "cpu",
                      "profile": {"source": "torch", "open_ranges": 0, "moved_ranges": 0, **facts}}, rows)  # fmt: skip


def _load(path) -> dict:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    try:
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8") as file:
            trace = json.load(file, parse_float=Decimal)
    except (ValueError, RecursionError, EOFError, OSError) as error:
        raise ProfileError(f"{path} is no JSON: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ProfileError(f"{path} is JSON without a list `traceEvents`; wanted what torch.profiler's export_chrome_trace writes")
    return trace


def _ns(microseconds) -> int:
    return round(microseconds * 1000)


def _times(events) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([_ns(event["ts"]) for event in events], np.int64)
    return start, start + np.array([_ns(event["dur"]) for event in events], np.int64)


def _threads(events, threads: dict) -> np.ndarray:
    return np.array([threads.setdefault((event["pid"], event["tid"]), len(threads)) for event in events], np.int64)


def _marks(spans, threads: dict) -> Marks:
    found = [event for event in spans if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)]
    named = [event["name"].removeprefix(PREFIX).rpartition(" ") for event in found]
    payload = np.array([int(number) for _, _, number in named], np.int64)
    return Marks(*_times(found), _threads(found, threads), payload, [words for words, _, _ in named])


def _calls(events, threads: dict) -> Calls:
    key = np.array([event["args"]["correlation"] for event in events], np.int64)
    sync = np.array([event["name"].startswith(SYNCS) for event in events], bool)
    return Calls(*_times(events), _threads(events, threads), key, sync)


def _operations(events) -> Operations:
    args = [event.get("args", {}) for event in events]
    what = [_what(event) for event in events]
    pageable = np.array(["Pageable" in event["name"] for event in events], bool)

    def integers(name, default):
        return np.array([fact.get(name, default) for fact in args], np.int64)

    return Operations(*_times(events), integers("correlation", -1), np.array(what, np.int64), integers("stream", 0), integers("bytes", 0), pageable)


def _what(event) -> int:
    if event["cat"] == "gpu_memcpy":
        return TO_DEVICE if "HtoD" in event["name"] else TO_HOST if "DtoH" in event["name"] else OTHER
    return KERNEL if event["cat"] == "kernel" else OTHER
