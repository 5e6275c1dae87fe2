"""Routing traces, `apexk.trace/1`: which experts each token chose, and which the next-layer prediction named.

A `NAME.trace.npz` holds, for T tokens in order of (step, request, position), L MoE layers and K experts a token:

    routed_experts     int16   [T, L, K]  expert ids, each once a token and layer
    step               int32   [T]        forward pass, non-decreasing
    request, position  int32   [T]        which sequence, where in it
    phase              uint8   [T]        0 prefill, 1 decode
    routed_weights     float16 [T, L, K]  optional, normalised within the top-k
    predicted_experts  int16   [T, L, K]  optional; for layer l, predicted at l-1; -1 for layer 0
    predicted_weights  float16 [T, L, K]  optional
    ahead_experts   int16   [T, D, L, K]  optional: for layer l, predicted at l-2 (first of D), l-3, ...; -1 where no layer is
    ahead_weights   float16 [T, D, L, K]  optional
    profile_counts     int64   [L, E]     optional: activations on a disjoint calibration split
    meta               JSON               schema, model, experts, top_k, layer_ids, dataset, seed, generator, licence
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apexk.inputs import reading
from apexk.outputs import writing

SCHEMA = "apexk.trace/1"
SAMPLES = Path(__file__).with_name("samples")
PREFILL, DECODE = 0, 1
#: array -> (dtype, axes); the first five are required
ARRAYS = {
    "routed_experts": (np.int16, "TLK"),
    "step": (np.int32, "T"),
    "request": (np.int32, "T"),
    "position": (np.int32, "T"),
    "phase": (np.uint8, "T"),
    "routed_weights": (np.float16, "TLK"),
    "predicted_experts": (np.int16, "TLK"),
    "predicted_weights": (np.float16, "TLK"),
    "ahead_experts": (np.int16, "TDLK"),
    "ahead_weights": (np.float16, "TDLK"),
    "profile_counts": (np.int64, "LE"),
}
REQUIRED = tuple(ARRAYS)[:5]


class TraceError(ValueError):
    """A trace breaks the schema; the message names the trace, the field and what was wanted."""


@dataclass(frozen=True)
class Trace:
    """A validated routing trace; arrays as in the module's table, `source` names where it came from."""

    routed_experts: np.ndarray
    step: np.ndarray
    request: np.ndarray
    position: np.ndarray
    phase: np.ndarray
    meta: dict
    routed_weights: np.ndarray | None = None
    predicted_experts: np.ndarray | None = None
    predicted_weights: np.ndarray | None = None
    ahead_experts: np.ndarray | None = None
    ahead_weights: np.ndarray | None = None
    profile_counts: np.ndarray | None = None
    source: str = "memory"

    def __post_init__(self):
        _validate(self)

    @property
    def tokens(self) -> int:
        return self.routed_experts.shape[0]

    @property
    def layers(self) -> int:
        return self.routed_experts.shape[1]

    @property
    def topk(self) -> int:
        return self.routed_experts.shape[2]

    @property
    def experts(self) -> int:
        return self.meta["experts"]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are there, by name."""
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}


def write(trace: Trace, path: str | Path) -> Path:
    """Writes `path`, compressed. The name must end in `.trace.npz`."""
    path = Path(path)
    if not path.name.endswith(".trace.npz"):
        raise ValueError(f"trace file {path}: the name must end in .trace.npz")
    with writing(path) as part, part.open("wb") as out:
        np.savez_compressed(out, meta=np.array(json.dumps(trace.meta)), **trace.arrays())
    return path


def samples() -> list[str]:
    """Traces that ship with apexk, as `read` takes them: "sample:NAME"."""
    return sorted(f"sample:{p.name.removesuffix('.trace.npz')}" for p in SAMPLES.glob("*.trace.npz"))


def read(path: str | Path) -> Trace:
    """Reads and checks a trace, by path or as "sample:NAME". Raises `TraceError` with what is missing or wrong."""
    if str(path) in samples():
        path = SAMPLES / (str(path).removeprefix("sample:") + ".trace.npz")
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"no trace file {path}; with apexk come {', '.join(samples())}")
    with reading(path, "npz", TraceError), np.load(path, allow_pickle=False) as data:
        found = {name: data[name] for name in data.files}
    missing = [name for name in (*REQUIRED, "meta") if name not in found]
    if missing:
        raise TraceError(f"trace {path}: {', '.join(missing)} missing; a trace holds {', '.join((*REQUIRED, 'meta'))}")
    unknown = sorted(found.keys() - ARRAYS.keys() - {"meta"})
    if unknown:
        raise TraceError(f"trace {path}: unknown arrays {', '.join(unknown)}; there are {', '.join(ARRAYS)}")
    with reading(path, "JSON in its meta", TraceError):
        meta = json.loads(str(found.pop("meta")))
    with reading(path, "a routing trace", TraceError):
        return Trace(**found, meta=meta, source=str(path))


def first_steps(trace: Trace, steps: int) -> Trace:
    """The first `steps` steps."""
    keep = trace.step < trace.step[0] + steps if trace.tokens else slice(0, 0)
    per_token = {name: array[keep] for name, array in trace.arrays().items() if ARRAYS[name][1][0] == "T"}
    return replace(trace, **per_token)


def require_same_model(traces: list[Trace]) -> None:
    """Raise `TraceError` unless all traces are of one model: same name, layers, experts and top-k."""
    for trace in traces[1:]:
        for what in ("layers", "experts", "topk"):
            a, b = getattr(traces[0], what), getattr(trace, what)
            if a != b:
                raise TraceError(f"mixed models: {traces[0].source} has {a} {what}, {trace.source} has {b}")
        a, b = traces[0].meta.get("model"), trace.meta.get("model")
        if a != b:
            raise TraceError(f"mixed models: {traces[0].source} is of {a!r}, {trace.source} of {b!r}")


def _validate(trace: Trace) -> None:
    def fail(what: str):
        raise TraceError(f"trace {trace.source}: {what}")

    meta = trace.meta
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        fail(f"schema is {meta.get('schema') if isinstance(meta, dict) else meta!r}, wanted {SCHEMA!r}")
    for key in ("experts", "top_k"):
        if type(meta.get(key)) is not int or meta[key] < 1:
            fail(f"meta.{key} is {meta.get(key)!r}, wanted a positive whole number")
    if trace.routed_experts.ndim != 3:
        fail(f"routed_experts has shape {list(trace.routed_experts.shape)}, wanted [T, L, K]")
    tokens, layers, topk = trace.routed_experts.shape
    ahead = trace.ahead_experts
    sizes = {"T": tokens, "L": layers, "K": topk, "E": meta["experts"], "D": ahead.shape[1] if ahead is not None and ahead.ndim == 4 else 1}
    if topk != meta["top_k"]:
        fail(f"routed_experts holds {topk} experts a token, meta.top_k says {meta['top_k']}")
    for name, array in trace.arrays().items():
        dtype, axes = ARRAYS[name]
        wanted = [sizes[a] for a in axes]
        if list(array.shape) != wanted:
            fail(f"{name} has shape {list(array.shape)}, wanted [{', '.join(axes)}] = {wanted}")
        if array.dtype != dtype:
            fail(f"{name} is {array.dtype}, wanted {np.dtype(dtype)}")
    if tokens == 0:
        return
    _check_ids(trace.routed_experts, meta["experts"], 0, "routed_experts", fail)
    if trace.predicted_experts is not None:
        _check_ids(trace.predicted_experts[:, 1:], meta["experts"], 0, "predicted_experts after layer 0", fail)
        if layers and (trace.predicted_experts[:, 0] != -1).any():
            fail("predicted_experts of layer 0 must be -1: no layer comes before it")
    for number in range(sizes["D"] if ahead is not None else 0):
        first = number + 2  # the first layer that is predicted from so far
        _check_ids(ahead[:, number, first:], meta["experts"], 0, f"ahead_experts from {first} layers before", fail)
        if (ahead[:, number, :first] != -1).any():
            fail(f"ahead_experts from {first} layers before must be -1 below layer {first}: no layer comes so far before it")
    for weights, ids in (("predicted_weights", "predicted_experts"), ("ahead_weights", "ahead_experts"), ("ahead_experts", "predicted_experts")):
        if getattr(trace, weights) is not None and getattr(trace, ids) is None:
            fail(f"{weights} without {ids}")
    if trace.phase.max() > DECODE:
        fail(f"phase holds {int(trace.phase.max())}, wanted 0 (prefill) or 1 (decode)")
    if (np.diff(trace.step) < 0).any():
        at = int(np.argmax(np.diff(trace.step) < 0)) + 1
        fail(f"steps are not ordered: row {at} has step {int(trace.step[at])} after {int(trace.step[at - 1])}")
    if (np.lexsort((trace.position, trace.request, trace.step)) != np.arange(tokens)).any():
        fail("rows are not ordered by (step, request, position)")


def _check_ids(ids: np.ndarray, experts: int, lowest: int, name: str, fail) -> None:
    if ids.size == 0:
        return
    if ids.min() < lowest or ids.max() >= experts:
        fail(f"{name} holds ids {int(ids.min())}..{int(ids.max())}, wanted {lowest}..{experts - 1}")
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        fail(f"{name} names an expert twice for one token and layer")
