"""A run as a trace for ui.perfetto.dev or chrome://tracing (the trace-event format, JSON).

One lane for the layers, each GPU stream, copy channel, CPU worker and host thread; rows of a lane that overlap go to a
second one. Arrows lead from the decision (or the prediction) to the copy it asked for, and on to the kernel that reads
what was copied.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

from apexk.outputs import writing
from apexk.timeline import Recording

from .layers import lines_of

PROCESS = 1
LANES = {"gpu": "GPU", "side": "GPU, predictor", "h2d": "copy channel", "cpu": "CPU workers", "host": "host thread"}
# names of Chrome's palette, near the colours of the pictures
COLORS = {
    "attention": "grey", "gpu.resident": "thread_state_running", "gpu.arrived": "thread_state_runnable", "copy.exact": "bad", "copy.spec": "yellow",
    "host.ffn": "good", "host.rows": "olive", "combine": "black", "shared": "thread_state_unknown", "unattributed": "white",
}  # fmt: skip
LEAST_NS = 1  # a decision takes no time on a modelled clock; an arrow needs something to start from


def write_trace(recording: Recording, path: str | os.PathLike) -> None:
    with writing(Path(path)) as part, part.open("w", encoding="utf-8") as file:
        json.dump(trace(recording), file, separators=(",", ":"))


def trace(recording: Recording) -> dict:
    """The trace as JSON values; ts and dur in microseconds."""
    lanes: dict[str, list[tuple[int, int, dict]]] = defaultdict(list)
    for line in lines_of(recording):
        args = {"step": line.step, "phase": line.phase, "window_ms": line.critical_ns / 1e6, "last": line.last, "exact": line.n_exact, "cpu_experts": line.n_cpu}
        lanes["layers"].append((line.start_ns, line.end_ns, {"name": f"L{line.layer:02d}", "cat": "layer", "args": args}))
    slices = {}
    for row in recording.rows:
        end = row["end_ns"] + (LEAST_NS if row["end_ns"] == row["start_ns"] and row["kind"] in ("plan", "predict") else 0)
        event = {"name": _name(row), "cat": row["kind"], "args": _arguments(row)}
        if row["kind"] in COLORS:
            event["cname"] = COLORS[row["kind"]]
        lanes[_lane(row)].append((row["start_ns"], end, event))
        slices[id(row)] = event
    events = [{"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 0, "args": {"name": f"apexk on {recording.header['device']}"}}]
    thread = 0
    for lane in sorted(lanes, key=_order):
        for part, rows in enumerate(_apart(lanes[lane])):
            thread += 1
            name = lane if part == 0 else f"{lane} ({part + 1})"
            events.append({"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": thread, "ts": 0, "args": {"sort_index": thread}})
            for start, end, event in rows:
                event.update(ph="X", pid=PROCESS, tid=thread, ts=start / 1000, dur=(end - start) / 1000)
                events.append(event)
    events += _flows(recording.rows, slices)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": recording.header["schema"], "times": recording.header["hardware"]}}


def _lane(row: dict) -> str:
    name = LANES[row["lane"]]
    if "stream" in row and row["lane"] != "cpu":
        return f"{name}, stream {row['stream']}"
    return f"{name}, thread {row['thread']}" if "thread" in row else name


def _order(lane: str) -> tuple:
    return next((i for i, name in enumerate(("layers", *LANES.values())) if lane.startswith(name)), 99), lane


def _apart(rows: list) -> list[list]:
    """As few lanes as possible, in none of which two rows overlap."""
    parts: list[list] = []
    for row in sorted(rows, key=lambda row: (row[0], row[1])):
        for part in parts:
            if part[-1][1] <= row[0]:
                part.append(row)
                break
        else:
            parts.append([row])
    return parts


def _name(row: dict) -> str:
    if row["kind"].startswith("copy."):
        return f"L{row['layer']:02d}/{row['kind']} {' '.join(map(str, row['experts']))}".strip() + (" (abandoned)" if row.get("abandoned") else "")
    return f"L{row['layer']:02d}/{row['kind']}"


def _arguments(row: dict) -> dict:
    kept = {name: row[name] for name in ("step", "phase", "bytes", "experts", "tokens", "count") if row.get(name)}
    if "decision" in row:
        kept["choice"] = row["decision"]["choice"]
    return kept


def _flows(rows: list[dict], slices: dict) -> list[dict]:
    """Arrows, three points each: from the decision or prediction, to the copy, to the first kernel that needs it."""
    causes, uses = {}, defaultdict(list)
    for row in rows:
        at = (row["step"], row["layer"])
        if row["kind"] in ("plan", "route"):
            if row["kind"] == "plan" or at not in causes:
                causes[at] = row
        elif row["kind"] == "predict":
            causes[row["step"], row["layer"] + 1, "predict"] = row
        elif row["kind"] in ("gpu.resident", "gpu.arrived"):
            uses[at].append(row)
    events, number = [], 0
    for row in rows:
        if not row["kind"].startswith("copy.") or row.get("abandoned"):
            continue
        at = (row["step"], row["layer"])
        cause = causes.get((*at, "predict")) if row["kind"] == "copy.spec" else causes.get(at)
        use = next((u for u in uses[at] if u["start_ns"] >= row["end_ns"] and (not u["experts"] or set(row["experts"]) & set(u["experts"]))), None)
        points = [(phase, slices[id(point)]) for phase, point in (("s", cause), ("t", row), ("f", use)) if point is not None]
        if cause is None or points[0][1]["ts"] > slices[id(row)]["ts"]:
            points = points[1:] if cause is not None else points
            points = [("s" if i == 0 else phase, event) for i, (phase, event) in enumerate(points)]
        if len(points) < 2:
            continue
        number += 1
        for i, (phase, event) in enumerate(points):
            last = i == len(points) - 1
            flow = {"ph": "f" if last else phase, "id": number, "name": row["kind"], "cat": "flow", "pid": PROCESS, "tid": event["tid"], "ts": event["ts"]}
            events.append(flow | ({"bp": "e"} if last else {}))
    return events
