"""From traces to what predictors are trained and judged on: loads by step, split by step, with no step on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from apexk.policy.predictor import KEEP, lift
from apexk.sim.demand import counts, step_slices
from apexk.sim.trace import Trace, TraceError, require_same_model

FEWEST = 8  # steps on each side of a split


@dataclass(frozen=True)
class Steps:
    """S consecutive steps of one trace: `loads [S, L, E]`, `tokens [S]`, and per distance (1, 2) the loads and score sums that the
    layers' own routers name that many layers before, `[S, L, E]`; None where the trace has no such predictions."""

    loads: np.ndarray
    tokens: np.ndarray
    topk: int
    router: dict[int, np.ndarray | None]
    scores: dict[int, np.ndarray | None]
    prints: tuple[str, ...]  # each step's fingerprint: the routing of all of its tokens
    source: str

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, last: int) -> Steps:
        """Steps `first` to `last`, the latter not included."""
        cut = slice(first, last)

        def of(arrays):
            return {d: None if a is None else a[cut] for d, a in arrays.items()}

        return replace(self, loads=self.loads[cut], tokens=self.tokens[cut], router=of(self.router), scores=of(self.scores), prints=self.prints[cut])


@dataclass(frozen=True)
class Features:
    """Lifts of the same steps, float32 `[S, L, E]`: `now` of the step itself, `last` and `recent` of those before (0 before the
    first), `router` by distance (0 where it names nothing or there is none)."""

    now: np.ndarray
    last: np.ndarray
    recent: np.ndarray
    router: dict[int, np.ndarray]


def steps_of(trace: Trace) -> Steps:
    """All steps of a trace. Raises TraceError where it has none."""
    if not trace.tokens:
        raise TraceError(f"{trace.source} has no token")
    loads, tokens, prints = [], [], []
    named = {1: (trace.predicted_experts, trace.predicted_weights), 2: (None, None)}
    if trace.ahead_experts is not None and trace.ahead_experts.shape[1]:
        weights = trace.ahead_weights
        named[2] = trace.ahead_experts[:, 0], None if weights is None else weights[:, 0]
    router: dict[int, list | None] = {d: None if ids is None else [] for d, (ids, _) in named.items()}
    scores: dict[int, list | None] = {d: None if weights is None else [] for d, (_, weights) in named.items()}
    for rows in step_slices(trace):
        ids = trace.routed_experts[rows]
        loads.append(counts(ids, trace.experts))
        tokens.append(rows.stop - rows.start)
        prints.append(hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16])
        for d, (names, weights) in named.items():
            if router[d] is not None:
                router[d].append(counts(names[rows], trace.experts))
            if scores[d] is not None:
                scores[d].append(counts(names[rows], trace.experts, weights[rows]))

    def stacked(lists):
        return {d: None if one is None else np.stack(one).astype(np.float32) for d, one in lists.items()}

    return Steps(np.stack(loads).astype(np.float32), np.array(tokens, np.float32), trace.topk, stacked(router), stacked(scores), tuple(prints), trace.source)


def features_of(steps: Steps) -> Features:
    tokens = steps.tokens[:, None]
    now = lift(steps.loads, tokens, steps.topk)
    last, recent = np.zeros_like(now), np.zeros_like(now)
    for s in range(1, len(steps)):
        last[s] = now[s - 1]
        recent[s] = KEEP * recent[s - 1] + (1 - KEEP) * now[s - 1]
    router = {d: np.zeros_like(now) if named is None else lift(named, tokens, steps.topk) for d, named in steps.router.items()}
    for d in router:
        router[d][:, :d] = 0.0  # no layer comes so far before
    return Features(now, last, recent, router)


def split(traces: Sequence[Trace], held_out: Trace | None, share: float) -> tuple[list[Steps], list[Steps]]:
    """(training steps, held-out steps): the last `share` of each trace's steps, or all of `held_out`, is held out.

    Raises ValueError where a held-out step is a training step too (all of its tokens routed alike in all layers), where a side is
    too small, and for traces of different models.
    """
    require_same_model([*traces, *([held_out] if held_out else [])])
    every = [steps_of(trace) for trace in traces]
    if held_out is not None:
        train, test = every, [steps_of(held_out)]
    else:
        if not 0 < share < 1:
            raise ValueError(f"the held-out share is {share!r}; wanted more than 0 and less than 1")
        cuts = [len(steps) - round(share * len(steps)) for steps in every]
        train = [steps.part(0, cut) for steps, cut in zip(every, cuts, strict=True)]
        test = [steps.part(cut, len(steps)) for steps, cut in zip(every, cuts, strict=True)]
    for what, side in (("train on", train), ("hold out", test)):
        if sum(map(len, side)) < FEWEST:
            raise ValueError(f"{sum(map(len, side))} steps to {what}; wanted at least {FEWEST}")
    known = {mark for steps in train for mark in steps.prints}
    both = sum(mark in known for steps in test for mark in steps.prints)
    if both:
        raise ValueError(f"{both} of {sum(map(len, test))} held-out steps are among the training steps (the same tokens, routed alike): the splits must be disjoint")
    return train, test
