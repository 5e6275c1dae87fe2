"""Order in which predicted experts are prefetched."""

from __future__ import annotations

from collections.abc import Collection

from .types import Prediction


def speculative_order(prediction: Prediction, resident: Collection[int]) -> tuple[int, ...]:
    """Predicted experts that are absent: most predicted tokens first, then largest sum of scores, then lowest id.

    That is the paper's ranking. An expert without a predicted token is not prefetched.
    """
    loads, scores = prediction.loads, prediction.scores
    absent = sorted([e for e, load in loads.items() if load > 0 and e not in resident])
    absent.sort(key={e: scores.get(e, 0.0) for e in absent}.__getitem__, reverse=True)  # sorts are stable
    absent.sort(key=loads.__getitem__, reverse=True)
    return tuple(absent)
