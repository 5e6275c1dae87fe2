"""Interval sets against sets of integers."""

from hypothesis import given
from hypothesis import strategies as st

from profiling.intervals import intersect, length, subtract, union

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)))


def points(a):
    return {t for start, end in a for t in range(start, end)}


def is_normal(a):
    return all(s < e for s, e in a) and all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1))


@given(intervals, intervals)
def test_against_integer_sets(left, right):
    a, b = union(left), union(right)
    assert is_normal(a) and points(a) == points(left) and length(a) == len(points(left))
    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert is_normal(intersect(a, b)) and is_normal(subtract(a, b))


def test_touching_intervals_join():
    assert union([(5, 9), (0, 5), (9, 9), (3, 4)]) == [(0, 9)]
    assert subtract([(0, 9)], [(0, 3), (4, 5), (8, 20)]) == [(3, 4), (5, 8)]
    assert intersect([(0, 9)], []) == [] == union([])
