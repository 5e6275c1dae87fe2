"""A policy that breaks its contract is named with what it said, before anything is launched for it."""

from dataclasses import replace

import pytest
from test_against_oracle import EXPERTS, run_engine, trace
from test_timeline import RULES

from apexk import policy as room
from apexk.policy.base import Policy
from apexk.policy.check import PlanError
from apexk.policy.types import Plan


class FetchAll(Policy):
    name = source = "fetch all"
    speculates, fetches, waits_in_flight = True, True, True

    def on_route(self, view):
        missed = [e for e in view.missed() if view.in_flight is None or e != view.in_flight.expert][: view.available]
        here = tuple(e for e in view.loads if e in view.resident)
        return Plan(here, tuple(missed), tuple(e for e in view.loads if e not in here and e not in missed))


def no_victims(self, layer, candidates, *_):
    return ()


def strangers(self, layer, candidates, *_):
    return (EXPERTS + 7,)


def twice(self, layer, candidates, count, step):
    return (min(candidates),) * count


def pairs_of_one(self, layer, candidates, count, step):
    return tuple((at, min(experts)) for at, experts in candidates.items() if experts)[:1] * count


def bare_ids(self, layer, candidates, count, step):
    return tuple(e for experts in candidates.values() for e in experts)[:count]


def too_many(self, layer):
    return tuple(range(EXPERTS))


def no_expert(self, layer):
    return (EXPERTS,)


def residents(self, layer, prediction, resident):
    return tuple(resident)


def the_same(self, layer, prediction, resident):
    return tuple([e for e in prediction.loads if e not in resident][:1]) * 2


def no_plan(self, view):
    self.missed = view.missed()


def half_a_plan(self, view):
    return Plan((), (), tuple(view.missed()[1:]))


@pytest.mark.parametrize(
    ("method", "broken", "scope", "said"),
    [
        ("on_route", no_plan, "layer", "layer 0, step 0: on_route returned NoneType, wanted a Plan"),
        ("on_route", half_a_plan, "layer", "layer 0, step 0: not planned"),
        ("victims", no_victims, "layer", r"named \(\) as victims; wanted 1 different"),
        ("victims", strangers, "layer", "as victims"),
        ("victims", twice, "layer", "as victims"),
        ("victims_for", strangers, "layer", "as victims"),
        ("victims_anywhere", no_victims, "global", r"named \(\) as victims"),
        ("victims_anywhere", bare_ids, "global", "as victims"),
        ("victims_anywhere", pairs_of_one, "global", "as victims"),
        ("initial", too_many, "layer", f"starts layer 0 with {EXPERTS} residents"),
        ("initial", too_many, "global", f"layer . with {EXPERTS} residents"),
        ("initial", no_expert, "layer", "starts layer 0 with 1 residents"),
        ("on_predict", residents, "layer", "prefetches .* none of those that are there"),
        ("on_predict", the_same, "global", "prefetches .* wanted different"),
    ],
)
def test_it_is_named_with_what_it_said(monkeypatch, method, broken, scope, said):
    bad = type("Bad", (FetchAll,), {method: broken, "name": "bad"})
    monkeypatch.setattr(room.registry, "get", lambda name, options: bad(options))
    steps, popularity = trace(1, 8)
    with pytest.raises(PlanError, match=f"'bad'.* .*{said}"):
        run_engine("bad", 2, steps, popularity, 8, settings=replace(RULES[0], pool_scope=scope))
