"""Replication by hand: what is overloaded, what is copied ahead, when a replica gives its slot up. And FlexGen's order."""

import pytest

from apexk import policy as room
from apexk.policy import kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.replication import overloaded
from apexk.policy.types import CostPrior, ModelShape, Prediction, RouteView

COSTS = AffineCosts(c0=0.0, a=0.0, b=0.1, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.0)


def started(spec="replication", capacity=8):
    made = room.get(spec)
    made.start(ModelShape(2, 16, 2), capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0), popularity=[list(range(16, 0, -1))] * 2)
    return made


def test_overloaded_is_above_twice_the_mean_of_the_active():
    """Mean of 20, 2, 1, 1, 0 (inactive) is 6: only 20 is above 12."""
    assert overloaded({0: 2, 1: 20, 2: 1, 3: 1, 4: 0}, 2.0) == [1]
    assert overloaded({3: 13, 1: 13, 0: 1, 2: 1, 5: 1, 6: 1}, 2.0) == [1, 3] and overloaded({}, 2.0) == []


def test_a_quarter_of_the_slots_is_for_replicas():
    assert started().initial(0) == (0, 1, 2, 3, 4, 5) and started("replication(spare=0)").initial(0) == tuple(range(8))
    for bad in ("theta=0.5", "spare=2", "theta=x"):
        with pytest.raises(ValueError, match="wanted a number"):
            room.get(f"replication({bad})")


def test_half_the_last_load_and_half_the_prediction():
    """9: (30 + 10)/2, 8: (0 + 24)/2, 0 to 5: (2 + 2)/2 each. Mean (20 + 12 + 6*2)/8 = 5.5, so 8 and 9 are above 11; 9 is resident in the second call."""
    made = started()
    made.on_layer_done(1, 0, "decode", {9: 30, **dict.fromkeys(range(6), 2)})
    coming = Prediction({9: 10, 8: 24, **dict.fromkeys(range(6), 2)}, {})
    assert made.on_predict(1, coming, frozenset(range(6))) == (9, 8)
    assert made.on_predict(1, coming, frozenset({*range(6), 9})) == (8,)
    assert made.on_predict(0, Prediction({7: 1, 8: 1}, {}), frozenset()) == (), "none is above the mean"


def test_a_replica_leaves_after_four_steps_below_half():
    made = started()
    loads = {9: 4, **dict.fromkeys(range(6), 4)}  # mean 4: at least 4 is not below half of twice the mean
    made.on_layer_done(0, 0, "decode", loads)
    for step in range(1, 5):
        assert made.victims_for(0, (10,), {9, 0, 1}, step) == ()
        made.on_layer_done(0, step, "decode", {9: 1, **dict.fromkeys(range(6), 4)})
    assert made.victims_for(0, (10, 11), {9, 0, 1}, 5) == (9,), "residents that stay are no replicas"
    made.on_layer_done(0, 5, "decode", loads)
    assert made.victims_for(0, (10,), {9, 0, 1}, 6) == (), "busy again"


def test_only_overloaded_misses_are_copied_and_only_into_replica_slots():
    """CPU 0.1 ms a pair, a copy 1 ms: 9 (30 pairs) is worth one, 10 (6) is not overloaded."""
    made = started()
    loads = {0: 1, 9: 30, 10: 6, 11: 1, 12: 1, 13: 1}

    def plan(resident, available):
        seen = RouteView(0, 0, "decode", 20, loads, frozenset(resident), available, COSTS, memory=made.recall(0, "decode", loads))
        return made.on_route(seen)

    assert plan(range(6), available=7).exact_fetch == (9,), "two free slots, five unused residents"
    assert plan((*range(6), 14, 15), available=7).exact_fetch == (), "no free slot, and no replica has been idle for long enough"


def test_an_overloaded_resident_is_split_and_others_are_not():
    """The GPU 0.1 ms a pair, the CPU 0.3 ms a pair: of 48 pairs on the GPU alone 36 stay, and the overloaded expert gives the others."""
    heavy = {0: 40, **dict.fromkeys(range(1, 5), 2)}
    costs = AffineCosts(c0=0.0, a=0.0, b=0.3, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.1)
    for spec, loads, wanted in (("replication", heavy, ((0, 28),)), ("replication(split=false)", heavy, ()), ("replication", dict.fromkeys(range(5), 9), ())):
        made = started(spec)
        view = RouteView(0, 0, "decode", 24, loads, frozenset(range(6)), 2, costs, memory=made.recall(0, "decode", loads))
        assert made.on_route(view).split == wanted
    with pytest.raises(ValueError, match="split is 1; wanted true or false"):
        room.get("replication(split=1)")


def test_flexgen_runs_in_order_of_id_on_the_gpu_alone():
    made = started("flexgen", capacity=2)
    assert made.initial(1) == (0, 1) and made.extra_slots(2) == 4
    view = RouteView(0, 0, "decode", 9, {7: 1, 0: 3, 3: 9}, frozenset({0, 1}), 0, COSTS)
    assert made.on_route(view) == room.Plan((0,), (3, 7), ())


@pytest.mark.parametrize("spec", ["replication(theta=1)", "replication(theta=3, spare=0.5)", "flexgen"])
def test_invariants(spec):
    assert kit.check_policy(lambda: room.get(spec), traces=120).copies > 0
