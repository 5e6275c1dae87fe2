"""Utilities against the direct sum, order of victims, exclusions."""

import itertools
import random

import numpy as np
import pytest

from apexk.policy.evict import exact_candidates, prefetch_candidates
from apexk.policy.utility import LayerUtility, LearntUtility


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 1.0])
def test_lazy_decay_equals_the_direct_formula(decay):
    rng, experts = random.Random(0), 10
    lazy, direct = LayerUtility(experts, decay), [0.0] * experts
    for step in range(60):
        loads = {e: rng.randint(1, 9) for e in rng.sample(range(experts), rng.randint(0, 4))}
        lazy.update(step, loads)
        direct = [decay * u + loads.get(e, 0) for e, u in enumerate(direct)]
        assert [lazy.read(e, step) for e in range(experts)] == pytest.approx(direct)


def test_popularity_is_scaled_to_the_first_load():
    utility = LayerUtility(4, 0.5, popularity=[6, 3, 1, 0])
    assert utility.lowest(range(4), 4, step=0) == (3, 2, 1, 0)  # the order counts before any load
    utility.update(0, {0: 15, 3: 5})  # 20 pairs: seeds are 12, 6, 2, 0
    assert [utility.read(e, 0) for e in range(4)] == pytest.approx([0.5 * 12 + 15, 3, 1, 5])


def test_victim_ties_go_to_the_longest_inactive_then_the_lowest_id():
    utility = LayerUtility(5, 0.5)
    utility.update(0, {2: 4})
    utility.update(1, {1: 2})
    assert utility.read(1, 1) == utility.read(2, 1)
    assert utility.lowest({4, 3, 2, 1}, 4, step=1) == (3, 4, 2, 1)
    assert utility.lowest({2}, 3, step=1) == (2,)
    assert utility.lowest((), 3, step=1) == ()


@pytest.mark.parametrize("popularity", [[9, 1, 4, 2, 7, 3, 3, 1], [1] * 8, None])
def test_the_learnt_weight_is_the_least_squares_line_over_all_experts(popularity):
    """Against the direct sums over every expert of every step, solved densely. An interrupted step may not reach a layer."""
    rng, decay, keep, experts = random.Random(3), 0.5, LearntUtility.KEEP, 8
    rule, u, standing = LearntUtility(experts, decay, popularity), np.zeros(experts), None
    gram, rhs, weight = np.zeros((3, 3)), np.zeros(3), LearntUtility.FIRST
    for step in range(30):
        if step in (7, 8, 20):
            u = decay * u
            continue
        loads = {e: rng.randint(1, 9) for e in rng.sample(range(experts), rng.randint(1, 4))}
        seen = np.log1p([loads.get(e, 0) for e in range(experts)])
        if step == 0 and popularity:
            standing = np.log1p(np.array(popularity) / sum(popularity) * sum(loads.values()))
        elif popularity:
            rows = np.stack([np.ones(experts), u, standing], 1)
            gram, rhs = keep * gram + rows.T @ rows + np.diag([0, 1e-6, 1e-6]), keep * rhs + rows.T @ seen
            if step >= LearntUtility.SAMPLES:
                _, a, b = np.linalg.solve(gram, rhs)
                weight = min(LearntUtility.MOST, max(0.0, b / a)) if a > 0 else LearntUtility.MOST
        u = decay * (u + seen)
        rule.update(step, loads)
        assert rule.weight == pytest.approx(weight, abs=1e-6)
        value = u / decay + (weight * standing if popularity else 0)
        order = rule.lowest(range(experts), experts, step)
        assert all(value[a] <= value[b] + 1e-9 for a, b in itertools.pairwise(order))


def test_learnt_without_loads_goes_by_popularity():
    rule = LearntUtility(4, 0.5, [6, 3, 1, 0])
    assert rule.lowest(range(4), 4, 0) == (3, 2, 1, 0)
    rule.update(0, {})
    assert rule.lowest(range(4), 4, 0) == (3, 2, 1, 0)


def test_exact_candidates():
    assert exact_candidates({1, 2, 3, 4}, active={2, 9}, held={3}) == {1, 4}


@pytest.mark.parametrize("rule, expected", [("predicted", {1}), ("in_use", {1, 2})])
def test_prefetch_candidates(rule, expected):
    found = prefetch_candidates({1, 2, 3, 4, 5}, predicted={2, 7}, prefetched={3}, held={4}, in_use={5}, rule=rule)
    assert found == expected


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="'predicted' and 'in_use'"):
        prefetch_candidates({1}, (), (), (), (), rule="lru")
