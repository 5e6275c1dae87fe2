"""Mira by hand: its regions, what passes through STAGE, who leaves which, and promotions with hysteresis."""

import pytest

from apexk import policy as room
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.types import CostPrior, ModelShape, Prediction, RouteView

COSTS = AffineCosts(c0=0.0, a=0.0, b=0.1, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.0)


def started(spec="mira", capacity=10):
    """Popular in the order 0, 1, 2, ...: of ten slots HOT has 0 to 6, STAGE starts with 7, 8, 9."""
    made = room.get(spec)
    made.start(ModelShape(3, 16, 2), capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0), popularity=[list(range(16, 0, -1))] * 3)
    return made


def route(made, loads, resident, layer=0):
    return made.on_route(RouteView(0, layer, "decode", 1, loads, frozenset(resident), 3, COSTS))


def test_the_gpu_runs_everything_or_the_cpu_the_misses():
    loads = {1: 1, 12: 3, 11: 2}
    plan = route(started(), loads, range(10))
    assert (plan.gpu_resident, plan.exact_fetch, plan.cpu) == ((1,), (12, 11), ())
    plan = route(started("mira(miss=cpu)"), loads, range(10))
    assert (plan.gpu_resident, plan.exact_fetch, set(plan.cpu)) == ((1,), (), {11, 12})
    assert started(capacity=1).extra_slots(1) == 3 and started("mira(miss=cpu)").extra_slots(1) == 0


def test_stage_takes_the_best_scored_as_many_as_it_has_slots():
    made = started()
    coming = Prediction({12: 5, 11: 1, 13: 1, 14: 1, 15: 0, 3: 9}, {12: 0.2, 11: 0.9, 13: 0.5, 14: 0.1, 15: 7.0, 3: 9.0})
    assert made.on_predict(1, coming, frozenset(range(10))) == (11, 13, 12), "by scores, not by tokens; 3 is there, 15 has no token"


def test_stage_replaces_the_oldest_that_no_prediction_names():
    made = started()
    resident = set(range(10))
    route(made, {12: 1}, resident, layer=2)  # asked for after 7, 8, 9
    assert made.victims(2, {1, 7, 8, 9, 12}, 2, 0) == (7, 8)
    assert made.victims(2, {1, 12, 9}, 2, 0) == (9, 12)
    made.on_predict(2, Prediction({9: 1}, {9: 1.0}), frozenset(resident))  # from two layers before
    made.on_predict(2, Prediction({8: 1}, {8: 1.0}), frozenset(resident))  # from the layer before
    assert made.victims_for(2, (13, 14, 15), {1, 7, 8, 9, 12}, 1) == (7, 12), "both predictions protect; HOT is never replaced ahead of need"
    made.on_layer_done(2, 1, "decode", {8: 1})
    assert made.victims_for(2, (13, 14, 15), {1, 7, 8, 9, 12}, 2) == (7, 8, 9), "the next pass predicts anew"


def test_demand_beyond_stage_takes_the_least_useful_of_hot():
    made = started()
    made.on_layer_done(0, 0, "decode", {**dict.fromkeys(range(7), 5), 4: 1, 2: 2})
    assert made.victims(0, {2, 3, 4, 9}, 3, 0) == (9, 4, 2)


def test_promotion_every_so_many_steps_and_only_past_the_margin():
    """Loads of the only counted steps (decay 0): HOT 10 each but 6 (4) and 5 (5); outside 12 (6), 11 (6), 10 (5).

    12 > 1.2*4: in, 6 out. 11 = 1.2*5 is not above it: the rest stays.
    """
    made = started("mira(every=4, utility_decay=0)")
    loads = {**dict.fromkeys(range(5), 10), 6: 4, 5: 5, 12: 6, 11: 6, 10: 5}
    for step in range(3):
        made.on_layer_done(1, step, "decode", loads)
        assert made.on_step_done(step) == ()
    made.on_layer_done(1, 3, "decode", {**loads, 12: 6, 11: 6})
    assert {e for layer, e in made.on_step_done(3) if layer == 1} == {0, 1, 2, 3, 4, 5, 11}, "equals go by id"
    assert made.victims(1, {5, 6, 7, 8, 9, 11}, 9, 4)[:4] == (7, 8, 9, 6), "6 has just come to STAGE"
    assert made.on_step_done(4) == ()


def test_no_slot_is_hot_in_a_tiny_pool_and_every_one_may_be():
    made = started(capacity=1)
    assert made.hot == [set()] * 3 and made.stage_slots == 4
    assert all(len(hot) == 10 for hot in started("mira(hot=1)").hot)


@pytest.mark.parametrize(("spec", "says"), [
    ("mira(hot=2)", "hot is 2"), ("mira(margin=0.5)", "margin is 0.5"), ("mira(every=0)", "every is 0"), ("mira(miss=drop)", "miss is 'drop'"),
    ("mira(evict=lru)", "evict is 'lru'; its regions need utilities"),
])  # fmt: skip
def test_refusals(spec, says):
    with pytest.raises(ValueError, match=says):
        room.get(spec)
