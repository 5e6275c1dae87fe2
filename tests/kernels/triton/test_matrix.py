"""The joined FFN over a pairwise cover of its matrix. A part runs always, the rest under the mark `slow`; `test_cover` states
the count."""

import itertools

import pytest

from apexk.kernels.bench.matrix import AXES, CASES, check, name, pairs_of

ALWAYS = 5  # cases that are not slow


def test_cover():
    met = set().union(*map(pairs_of, CASES))
    for (i, (_, a)), (j, (_, b)) in itertools.combinations(enumerate(AXES.items()), 2):
        assert all(((i, x), (j, y)) in met for x in a for y in b)
    assert len(CASES) == 50


@pytest.mark.parametrize("case", [pytest.param(c, id=name(c), marks=[pytest.mark.slow] if i >= ALWAYS else []) for i, c in enumerate(CASES)])
def test_equals_reference(case, device):
    check(case, device)
