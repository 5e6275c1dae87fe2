"""Sets of time as sorted, disjoint, non-touching half-open intervals `(start, end)` in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Set = list[Interval]


def union(intervals: Iterable[Interval]) -> Set:
    """The set that any intervals cover; empty ones (end <= start) cover nothing."""
    merged: Set = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> Set:
    """What both sets cover."""
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> Set:
    """What `a` covers and `b` does not."""
    rest, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                rest.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def length(a: Sequence[Interval]) -> int:
    """Total time of a set, in ns."""
    return sum(end - start for start, end in a)
