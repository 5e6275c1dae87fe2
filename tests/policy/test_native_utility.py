"""Native utilities against their Python form, bit for bit, on histories of every kind; `test_evict` has the truth of both."""

import copy
import pickle
import random

import pytest

from apexk.device.base import active_loads
from apexk.policy.native import utility as native
from apexk.policy.utility import LayerUtility, LearntUtility, lowest_ref, update_ref

EXPERTS = 40


@pytest.fixture
def in_python(monkeypatch):
    """`in_python(on)`: whether everything is left to Python."""

    def set_to(on: bool) -> None:
        if on:
            monkeypatch.setattr(native, "load", lambda: None)
        else:
            monkeypatch.undo()

    return set_to


@pytest.mark.parametrize("kind", [LayerUtility, LearntUtility])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.93, 1.0])
def test_both_forms_agree_to_the_last_bit(in_python, kind, decay):
    """Steps that do not reach the layer, steps without loads, few and many candidates, ties."""
    rng = random.Random(decay)
    popularity = None if decay == 0.5 else [rng.randint(0, 9) for _ in range(EXPERTS)]
    here, there = kind(EXPERTS, decay, popularity), kind(EXPERTS, decay, popularity)
    step = 0
    for _ in range(60):
        loads = {e: rng.randint(1, 3) for e in rng.sample(range(EXPERTS), rng.choice((0, 1, 7, 40)))}
        candidates, count = frozenset(rng.sample(range(EXPERTS), rng.randint(0, EXPERTS))), rng.randint(0, EXPERTS + 2)
        for rule, python in ((here, False), (there, True)):
            in_python(python)
            rule.chosen = rule.lowest(candidates, count, step)
            rule.update(step, loads)
        assert here.chosen == there.chosen and len(here.chosen) == min(count, len(candidates))
        assert here.value == there.value and here.active == there.active
        assert getattr(here, "weight", 0) == getattr(there, "weight", 0)
        step += rng.choice((1, 1, 1, 4))


def test_loads_as_the_device_packs_them():
    import torch

    counted = torch.bincount(torch.tensor([3, 3, 7, 39, 7, 3]), minlength=EXPERTS)
    packed, plain = LearntUtility(EXPERTS, 0.5, [1] * EXPERTS), LearntUtility(EXPERTS, 0.5, [1] * EXPERTS)
    packed.update(0, active_loads(counted))
    plain.update(0, {3: 3, 7: 2, 39: 1})
    assert packed.value == plain.value and packed.standing_sums == plain.standing_sums


def test_what_it_cannot_read_changes_nothing_and_is_left_to_python():
    rule = LearntUtility(4, 0.5, [1, 2, 3, 4])
    rule.update(3, {1: 2})
    state, before = rule._state(3), copy.deepcopy(rule.value)
    for step, loads in ((3, {1: 0.5}), (3, {1: 1, 4: 1}), (3, {-1: 1}), (3, {0: 1 << 70}), (3, {2: 1, 0: -1}), (2, {1: 1}), (99, {0: 1})):
        assert native.update(state, step, loads, True) is None and rule.value == before, loads
    for step, experts in ((3, (4,)), (3, (-1,)), (3, (1 << 70,)), (2, (1,)), (99, (0,))):
        assert native.lowest(state, step, experts, 1) is None
    with pytest.raises(IndexError):
        rule.lowest((7,), 1, 3)
    fractions = LayerUtility(4, 0.5)
    fractions.update(0, {2: 0.25})
    assert fractions.read(2, 1) == 0.125


def test_copies_of_a_rule_go_on_by_themselves():
    rule = LearntUtility(EXPERTS, 0.5, range(EXPERTS))
    rule.update(0, {1: 4, 2: 1})
    for copied in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        before = copied.lowest(range(EXPERTS), 5, 1)
        rule.update(1, {e: 9 for e in before})
        assert copied.lowest(range(EXPERTS), 5, 1) == before != rule.lowest(range(EXPERTS), 5, 1)
        rule = copied


def test_the_python_forms_are_what_the_native_ones_are_compared_with():
    rule = LearntUtility(EXPERTS, 0.5, range(EXPERTS))
    mine, other = rule._state(0), copy.deepcopy(rule._state(0))
    loads = {e: e + 1 for e in range(0, EXPERTS, 3)}
    assert native.update(mine, 0, loads, True) == update_ref(other, 0, loads, True) and mine.value == other.value
    assert native.lowest(mine, 0, range(EXPERTS), 9) == lowest_ref(other, 0, range(EXPERTS), 9)
