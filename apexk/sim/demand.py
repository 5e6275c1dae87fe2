"""From a trace to what the engine is given: each layer's token loads and the prediction for it, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from apexk.sim.trace import PREFILL, Trace

Loads = Mapping[int, int]
Predicted = tuple[Loads, Mapping[int, float]]


@dataclass(frozen=True)
class Step:
    """One forward pass: `loads[layer]` (expert -> tokens), `predicted[layer]` (loads, score sums) or None.

    `predicted` was made one layer before, `farther[0]` two layers before, and so on.
    """

    tokens: int
    phase: str
    loads: list[Loads]
    predicted: list[Predicted | None]
    farther: tuple[list[Predicted | None], ...] = ()
    weighed: tuple[np.ndarray, np.ndarray] | None = None  # ids and weights [T, L, K], where the trace has weights

    def seen_from(self, layer: int, look_ahead: int = 1) -> list[Predicted]:
        """What is predicted at `layer` for the next `look_ahead` layers, nearest first, as far as the trace and the model go."""
        found = []
        for later, made in enumerate((self.predicted, *self.farther)[:look_ahead], layer + 1):
            if later == len(made) or made[later] is None:
                break
            found.append(made[later])
        return found

    def places(self, layer: int) -> dict[int, int]:
        """By active expert: its best place in any token's order of weights, 0 the heaviest. Raises ValueError where the trace has no weights."""
        if self.weighed is None:
            raise ValueError("the trace holds no routed weights, by which some experts would be deferred")
        ids, weights = (array[:, layer] for array in self.weighed)
        ordered = np.take_along_axis(ids, np.argsort(-weights, axis=1, kind="stable"), 1)
        best: dict[int, int] = {}
        for place in reversed(range(ordered.shape[1])):
            best.update(dict.fromkeys(ordered[:, place].tolist(), place))
        return best


@dataclass(frozen=True)
class Demand:
    """All steps of a trace, ready to run; `popularity [L][E]` from its calibration split if it has one."""

    layers: int
    experts: int
    topk: int
    steps: list[Step]
    popularity: list[list[int]] | None
    model: str | None
    source: str


def step_slices(trace: Trace) -> Iterator[slice]:
    """Rows of each step, in order."""
    edges = np.flatnonzero(np.diff(trace.step)) + 1
    starts = np.concatenate(([0], edges)) if trace.tokens else np.empty(0, int)
    for begin, end in zip(starts, np.append(starts[1:], trace.tokens), strict=True):
        yield slice(int(begin), int(end))


def counts(ids: np.ndarray, experts: int, weights: np.ndarray | None = None) -> np.ndarray:
    """`ids [T, L, K]` (-1: none) -> tokens, or sums of `weights`, of each layer's experts, `[L, E]`."""
    layers = ids.shape[1]
    place = ids.astype(np.int64) + np.arange(layers)[:, None] * experts
    real = ids >= 0
    chosen = None if weights is None else weights.astype(np.float64)[real]
    return np.bincount(place[real], weights=chosen, minlength=layers * experts).reshape(layers, experts)


def demand_of(trace: Trace) -> Demand:
    """A step counts as prefill if any of its tokens is of a prompt."""
    steps = []
    for rows in step_slices(trace):
        loads = [_sparse(row) for row in counts(trace.routed_experts[rows], trace.experts)]
        predicted: list[Predicted | None] = [None] * trace.layers
        if trace.predicted_experts is not None:
            predicted = _predicted(trace.predicted_experts[rows], _part(trace.predicted_weights, rows), trace.experts, 1)
        far = 0 if trace.ahead_experts is None else trace.ahead_experts.shape[1]
        farther = [_predicted(trace.ahead_experts[rows, d], _part(trace.ahead_weights, (rows, d)), trace.experts, d + 2) for d in range(far)]
        phase = "prefill" if (trace.phase[rows] == PREFILL).any() else "decode"
        steps.append(Step(rows.stop - rows.start, phase, loads, predicted, tuple(farther),
                          None if trace.routed_weights is None else (trace.routed_experts[rows], trace.routed_weights[rows])))
    popularity = None if trace.profile_counts is None else trace.profile_counts.tolist()
    return Demand(trace.layers, trace.experts, trace.topk, steps, popularity, trace.meta.get("model"), trace.source)


def _predicted(ids: np.ndarray, weights: np.ndarray | None, experts: int, first: int) -> list[Predicted | None]:
    """`ids [T, L, K]` that were predicted for the layers from `first` on -> (loads, score sums) by layer; tokens where no weights are."""
    loads = counts(ids, experts)
    scores = counts(ids, experts, weights) if weights is not None else loads.astype(float)
    return [*[None] * min(first, len(loads)), *((_sparse(n), _sparse(q, n)) for n, q in zip(loads[first:], scores[first:], strict=True))]


def _part(array: np.ndarray | None, where) -> np.ndarray | None:
    return None if array is None else array[where]


def _sparse(row: np.ndarray, where: np.ndarray | None = None) -> dict:
    """Non-zero entries of a row by index (of `where` if given), as plain Python numbers."""
    index = np.flatnonzero(row if where is None else where)
    return dict(zip(index.tolist(), row[index].tolist(), strict=True))
