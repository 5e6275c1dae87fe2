"""Each policy: valid plans, purity, replay, what it may do; the checker; the registry; the room's imports."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexk import policy as room
from apexk.policy.types import CostPrior, ModelShape, Observation, Plan, PolicyOptions, Prediction, RouteView

sys.path.insert(0, str(Path(__file__).parent))
from strategies import views  # noqa: E402

sys.path.pop(0)

PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)
SHAPE = ModelShape(layers=3, experts=12, topk=2)


FAMILY = ("apex", "apex_paper", "ea_only", "sa_only", "no_assign")  # the others: test_every_policy.py


@pytest.fixture(params=FAMILY)
def policy(request):
    made = room.get(request.param)
    made.start(SHAPE, capacity=4, prior=PRIOR)
    return made


def test_policies_under_random_views(policy):
    @settings(max_examples=120)
    @given(views())
    def check(view):
        plan = policy.on_route(view)
        room.check_plan(view, plan)
        assert plan == policy.on_route(view)
        assert plan.exact_fetch == () or policy.fetches
        missed = view.missed()
        if view.in_flight is None:
            assert (plan.exact_fetch + plan.cpu)[: len(missed)] == tuple(missed)
            assert policy.name == "apex" or len(plan.exact_fetch + plan.cpu) == len(missed), "only Apex leaves residents to the CPU"
        text = json.dumps(room.decision_to_dict(policy.name, view, plan))
        name, view_again, plan_again = room.decision_from_dict(json.loads(text))
        assert (view_again, plan_again) == (view, plan)
        assert room.get(name).on_route(view_again) == plan

    check()


@settings(max_examples=100)
@given(st.data())
def test_residency_invariants_over_a_run(data):
    """Plan, pick victims, apply, speculate: the pool never overflows and nothing needed is evicted."""
    policy = room.get(data.draw(st.sampled_from(FAMILY)))
    capacity = data.draw(st.integers(0, SHAPE.experts))
    policy.start(SHAPE, capacity, PRIOR, seed=data.draw(st.integers(0, 9)))
    resident = [set(policy.initial(i)) for i in range(SHAPE.layers)]
    expert = st.integers(0, SHAPE.experts - 1)
    for step in range(3):
        for layer in range(SHAPE.layers):
            loads = data.draw(st.dictionaries(expert, st.integers(1, 9), min_size=1))
            here = resident[layer]
            idle = room.exact_candidates(here, loads, held=())
            free = capacity - len(here)
            view = RouteView(step, layer, "decode", 9, loads, frozenset(here), free + len(idle), policy.costs("decode"))
            plan = policy.on_route(view)
            room.check_plan(view, plan)
            out = policy.victims(layer, idle, max(0, plan.transfer_count - free), step)
            assert not set(out) & set(loads)
            here -= set(out)
            here |= set(plan.exact_fetch)
            assert len(here) <= capacity
            guess = Prediction({e: 1 for e in loads}, {e: 0.5 for e in loads})
            queue = policy.on_predict((layer + 1) % SHAPE.layers, guess, frozenset(here))
            assert not set(queue) & here and set(queue) <= set(loads)
            policy.on_layer_done(layer, step, "decode", loads)
            policy.observe("decode", Observation(1, 1, 1.0, 1, 1, 1.0, 1, 1.0))
        assert policy.on_step_done(step) == ()


@pytest.mark.parametrize(
    "name, speculates, fetches",
    [("apex", 1, 1), ("apex_paper", 1, 1), ("ea_only", 0, 1), ("sa_only", 1, 0), ("no_assign", 0, 0)],
)
def test_what_a_policy_may_do(name, speculates, fetches):
    policy = room.get(name)
    assert (policy.speculates, policy.fetches, policy.lossless) == (bool(speculates), bool(fetches), True)
    guess = Prediction({3: 2, 1: 2, 5: 7, 0: 9, 8: 2, 9: 0}, {3: 0.5, 1: 0.5, 5: 0.1, 0: 1.0, 8: 0.9})
    assert policy.on_predict(1, guess, frozenset({0})) == ((5, 8, 1, 3) if speculates else ())


def test_apex_paper_is_the_literal_reading():
    policy = room.get("apex_paper", PolicyOptions(cost="affine"))
    policy.start(SHAPE, 4, PRIOR)
    assert policy.options.cost == "rates" and policy.costs("decode").as_dict()["kind"] == "rates"
    view = RouteView(0, 0, "decode", 9, {0: 90, 1: 5, 2: 4}, frozenset({0}), 4, policy.costs("decode"))
    assert policy.on_route(view) == room.get("ea_only").on_route(replace(view, resident_first=False))


def test_initial_residents():
    policy = room.get("apex")
    policy.start(SHAPE, 3, PRIOR, popularity=[[0, 5, 1, 5, 0, 9, 0, 0, 0, 0, 0, 0]] * 3)
    assert policy.initial(1) == (5, 1, 3)
    for capacity in (0, 1, 4, 5, 12, 40):
        policy.start(SHAPE, capacity, PRIOR, seed=7)
        ids = policy.initial(2)
        assert len(set(ids)) == len(ids) == min(capacity, 12)
        assert ids == policy.initial(2)
        if 1 < capacity <= 12:
            ordered = sorted(ids)
            gaps = {(b - a) % 12 for a, b in zip(ordered, ordered[1:] + ordered[:1], strict=True)}
            assert gaps <= {12 // capacity, -(-12 // capacity), 0}


def test_costs_are_frozen_and_kept_per_phase():
    policy = room.get("apex")
    policy.start(SHAPE, 4, PRIOR)
    before, prefill = policy.costs("decode"), policy.costs("prefill")
    value = before.cpu_ms(3, 3)
    policy.observe("decode", Observation(cpu_experts=3, cpu_pairs=3, cpu_ms=50.0))
    assert before.cpu_ms(3, 3) == value
    assert policy.costs("decode").cpu_ms(3, 3) > 10 * value
    assert policy.costs("prefill") == prefill


@pytest.mark.parametrize(
    "plan, complaint",
    [
        (Plan((0,), (1,), ()), "not planned: \\[2\\]"),
        (Plan((0,), (1, 1), (2,)), "planned twice: \\[1\\]"),
        (Plan((0,), (1,), (2, 5)), "not active: \\[5\\]"),
        (Plan((0, 1), (), (2,)), "not resident but in gpu_resident: \\[1\\]"),
        (Plan((), (0,), (1, 2)), "resident but in exact_fetch: \\[0\\]"),
        (Plan((0,), (1, 2), ()), "2 exact copies for 1 available"),
    ],
)
def test_broken_plans_are_refused(plan, complaint):
    costs = room.costs_from_dict({"kind": "rates", "cpu": 1.0, "gpu": 1.0, "copy": 1.0})
    view = RouteView(0, 0, "decode", 4, {0: 1, 1: 1, 2: 1}, frozenset({0, 4}), 1, costs)
    with pytest.raises(room.PlanError, match=complaint):
        room.check_plan(view, plan)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown policy 'best'; there are apex, "):
        room.get("best")
    with pytest.raises(ValueError, match="unknown cost model 'x'"):
        room.costs_from_dict({"kind": "x"})
    with pytest.raises(ValueError, match="rate_ema is 0"):
        room.get("apex", PolicyOptions(rate_ema=0.0))
    with pytest.raises(ValueError, match="there are 'affine' and 'rates'"):
        room.get("apex", PolicyOptions(cost="exact"))
    with pytest.raises(ValueError, match="3 rows of 12"):
        room.get("apex").start(SHAPE, 4, PRIOR, popularity=[[1] * 12] * 2)
    with pytest.raises(ValueError, match="capacity is -1"):
        room.get("apex").start(SHAPE, -1, PRIOR)


def test_room_imports_the_standard_library_only():
    code = (
        "import sys, apexk.policy\n"
        "tops = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names) - {'apexk', '__main__'}\n"
        "print(sorted(t for t in tops if not t.startswith(('_', 'sitecustomize'))))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
