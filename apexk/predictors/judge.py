"""How good predictions are on held-out steps: a trained predictor beside what needs no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from apexk.policy.predictor import Predictor, above
from apexk.policy.replication import overloaded
from apexk.predictors.data import Steps

TRAINED = "trained"
THETA = 2.0  # overload in the judgement of the recurrent kind: as `replication` has it


@dataclass
class Score:
    """One predictor's figures over all held-out steps but each trace's first, and all layers that it can predict.

    Each names as many experts a layer and step as are active there: `experts` is the share of active experts among those named,
    `tokens` the share of (token, expert) pairs that go to them. For the next layer's loads also `error`, the mean over experts of
    |expected load - load| over the mean load of all, and `precision`, `recall` and `f1` of the experts named as overloaded.
    """

    name: str
    experts: float
    tokens: float
    error: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None


Guess = Callable[[Steps, int, int], np.ndarray]  # (steps, step, layer) -> a worth by expert, [E]


def judge(predictor: Predictor, train: Sequence[Steps], test: Sequence[Steps]) -> list[Score]:
    """The predictor, then what a policy would do without it, popularity of the training steps, and the step before."""
    popular = sum(one.loads.sum(0) for one in train) / sum(float(one.tokens.sum()) for one in train)
    distance = predictor.distance
    scores = [_score(TRAINED, predictor, test, _trained(predictor, test))]
    if all(one.router[distance] is not None for one in test):
        scores.append(_score(f"router, {distance} layer{'s' * (distance > 1)} early", predictor, test, lambda steps, s, layer: _router(steps, s, layer, distance)))
        if distance == 1:
            scores.append(_score("running mix", predictor, test, lambda steps, s, layer: 0.5 * steps.loads[s - 1, layer] + 0.5 * steps.router[1][s, layer]))
    scores.append(_score("popularity", predictor, test, lambda steps, s, layer: popular[layer] * steps.tokens[s]))
    scores.append(_score("step before", predictor, test, lambda steps, s, layer: steps.loads[s - 1, layer] * (steps.tokens[s] / steps.tokens[s - 1])))
    return scores


def _router(steps: Steps, s: int, layer: int, distance: int) -> np.ndarray:
    """Loads; for two layers, where a policy ranks by scores, the score sums where the trace has them."""
    named = steps.scores[distance] if distance > 1 and steps.scores[distance] is not None else steps.router[distance]
    return named[s, layer]


def _trained(predictor: Predictor, test: Sequence[Steps]) -> Guess:
    """Expected loads, made in the order of a run, as a policy makes them."""
    made: dict[int, np.ndarray] = {}
    for steps in test:
        predictor.reset(steps.topk)
        found = np.zeros_like(steps.loads)
        for s, tokens in enumerate(steps.tokens.tolist()):
            loads = [_sparse(row) for row in steps.loads[s]]
            for layer in range(predictor.distance, predictor.layers):
                named = steps.router[predictor.distance]
                router = None if named is None else _sparse(named[s, layer])
                found[s, layer] = tokens * predictor.chances(layer, tokens, router, loads[layer - predictor.distance])
            for layer, row in enumerate(loads):
                predictor.learn(layer, row)
        made[id(steps)] = found
    return lambda steps, s, layer: made[id(steps)][s, layer]


def _score(name: str, predictor: Predictor, test: Sequence[Steps], guess: Guess) -> Score:
    def heavy_by(worth: np.ndarray, tokens: float) -> list[int]:
        # a trained predictor expects a little of every expert, so that its mean is over those that it expects to be active
        return above(worth / tokens, tokens, THETA) if name == TRAINED else overloaded(_sparse(worth), THETA)

    distance, named, there, covered, pairs, error, mean = predictor.distance, 0, 0, 0.0, 0.0, 0.0, 0.0
    said = true = right = 0
    for steps in test:
        for s in range(1, len(steps)):
            for layer in range(distance, predictor.layers):
                truth, worth = steps.loads[s, layer], guess(steps, s, layer)
                count = int((truth > 0).sum())
                top = np.argsort(-worth, kind="stable")[:count]
                named, there = named + count, there + int((truth[top] > 0).sum())
                covered, pairs = covered + float(truth[top].sum()), pairs + float(truth.sum())
                if distance == 1:
                    error, mean = error + float(np.abs(worth - truth).mean()), mean + float(truth.mean())
                    wanted, heavy = set(overloaded(_sparse(truth), THETA)), set(heavy_by(worth, steps.tokens[s]))
                    said, true, right = said + len(heavy), true + len(wanted), right + len(wanted & heavy)
    score = Score(name, there / named, covered / pairs)
    if distance == 1:
        score.error, score.precision, score.recall = error / mean, right / said if said else 0.0, right / true if true else 0.0
        score.f1 = 2 * right / (said + true) if said + true else 0.0
    return score


def _sparse(row: np.ndarray) -> dict[int, float]:
    index = np.flatnonzero(row)
    return dict(zip(index.tolist(), row[index].tolist(), strict=True))
