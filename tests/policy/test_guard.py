"""The guard stops copying where measured plans lose, says so, tries again, and rests longer after a second loss."""

import logging
from dataclasses import replace

from apexk.policy import get
from apexk.policy.guard import LONGEST_REST, REST, SAMPLES, Guard
from apexk.policy.types import CostPrior, ModelShape, Observation, Prediction, RouteView

PRIOR = CostPrior(c0=0.5, a=0.1, b=0.05, s0=0.1, t1=0.2, g0=0.1, g1=0.01, g2=0.001)
LOSES = Observation(copies=2, copy_ms=5.0, layer=1, path_ms=9.0, unassigned_ms=3.0)


def started(spec="apex"):
    policy = get(spec)
    policy.start(ModelShape(3, 12, 2), 4, PRIOR)
    return policy


def route(policy, layer=1):
    view = RouteView(0, layer, "decode", 8, {5: 9, 6: 4, 7: 3}, frozenset(), 4, started().costs("decode"), memory=policy.recall(layer, "decode", {}))
    return policy.on_route(view)


def test_a_losing_layer_stops_copying_and_tries_again(caplog):
    policy = started()
    assert route(policy).transfer_count > 0
    with caplog.at_level(logging.WARNING, "apexk"):
        for _ in range(SAMPLES):
            policy.guard.observe("decode", LOSES)
    assert "layer 1, decode: copying plans measure 200 % slower" in caplog.text
    assert route(policy).transfer_count == 0 and route(policy, layer=0).transfer_count > 0
    guess = Prediction({3: 2}, {3: 1.0})
    assert policy.on_predict(1, guess, frozenset()) == () and policy.on_predict(2, guess, frozenset()) == (3,)
    for step in range(REST):
        assert route(policy).transfer_count == 0
        policy.on_layer_done(1, step, "decode", {5: 1})
    assert route(policy).transfer_count > 0 and policy.guarded_layers == REST
    for _ in range(SAMPLES):
        policy.guard.observe("decode", LOSES)
    assert policy.guard.watched["decode", 1].resting == 2 * REST


def test_what_does_not_count():
    guard = Guard()
    for seen in (replace(LOSES, copies=0), replace(LOSES, unassigned_ms=None), replace(LOSES, path_ms=None), replace(LOSES, path_ms=3.03)):
        for _ in range(3 * SAMPLES):
            guard.observe("decode", seen)
    assert not guard.resting("decode", 1)
    for _ in range(SAMPLES - 1):
        guard.observe("prefill", LOSES)
    assert not guard.resting("prefill", 1)
    guard.observe("prefill", LOSES)
    assert guard.resting("prefill", 1) and not guard.resting("decode", 1)


def test_rest_has_a_longest():
    guard = Guard()
    for _ in range(12):
        for _ in range(SAMPLES):
            guard.observe("decode", LOSES)
        guard.watched["decode", 1].resting = 0
    assert guard.watched["decode", 1].rest == LONGEST_REST


def test_the_guard_can_be_left_out():
    assert started("apex(guard=false)").guard is None and started("apex_paper").guard is None
    assert started("apex(cost=rates)").guard is None


def test_a_bad_start_alone_does_not_count():
    """Three losses, then even: the median of eight stays below the margin."""
    guard = Guard()
    for number in range(40):
        guard.observe("decode", LOSES if number < 3 else replace(LOSES, path_ms=3.0))
        assert not guard.resting("decode", 1)
