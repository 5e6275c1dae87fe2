"""Plans in waves that find no slot are refused, never waited for; a prefetch under way may stand anywhere in a plan's order."""

import pytest
from test_against_oracle import run_engine, trace
from test_ordering import Unreliable
from test_timeline import check_every_pair_once

from apexk import policy as room
from apexk.device.checked import CheckedDevice
from apexk.engine.runtime import EngineSettings
from apexk.hardware import load
from apexk.policy.base import Policy
from apexk.policy.check import PlanError
from apexk.policy.types import Plan
from apexk.timeline.writer import Timeline


class All(Policy):
    """Copies every missed expert, in waves."""

    name = source = "all"
    speculates, fetches, waits_in_flight, waves = False, True, False, True

    def on_route(self, view):
        return Plan(tuple(e for e in view.loads if e in view.resident), tuple(view.missed()), ())


class Ahead(All):
    """The same, a prefetch under way last."""

    name = source = "ahead"
    speculates = waits_in_flight = True

    def on_route(self, view):
        running = view.in_flight and view.in_flight.expert
        return Plan(tuple(e for e in view.loads if e in view.resident), tuple(sorted(view.missed(), key=lambda e: e == running)), ())


class HoldsAll(All):
    name = source = "holds all"

    def holds(self, view):
        return frozenset(range(10_000))


class GivesUp(Ahead):
    """Its extra slots fill with prefetches, which its copies then replace."""

    name = source = "gives up"
    keeps_fetched = False

    def extra_slots(self, capacity):
        return 2


def run(monkeypatch, made, capacity, seed=1, scope="layer", hardware="a6000-paper", late=0.0, tokens=8):
    monkeypatch.setattr(room.registry, "get", lambda name, options: made(options))
    steps, popularity = trace(seed, tokens)
    timeline = Timeline(None, keep=True)
    run_engine(made.name, capacity, steps, popularity, tokens, timeline, load(hardware), EngineSettings(pool_scope=scope),
               wrap=lambda device: CheckedDevice(Unreliable(device, seed, late=late)))
    check_every_pair_once(steps, timeline.rows)


@pytest.mark.parametrize(("made", "capacity"), [(All, 0), (HoldsAll, 3)])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_no_slot_for_a_wave_is_said(monkeypatch, made, capacity, scope):
    with pytest.raises(PlanError, match=f"'{made.name}', layer 0, step 0: .* copies are still to come"):
        run(monkeypatch, made, capacity, scope=scope)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_copies_replace_the_prefetches_that_fill_the_extra_slots(monkeypatch, seed, scope):
    run(monkeypatch, GivesUp, 2, seed, scope, "pinned-link-c0.3")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_prefetch_under_way_stands_anywhere_in_the_order(monkeypatch, seed, scope):
    run(monkeypatch, Ahead, 8, seed, scope)


@pytest.mark.parametrize("late", [0.3, 0.9])
@pytest.mark.parametrize("capacity", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_slots_whose_copies_are_not_known_to_have_landed_serve_waves_too(monkeypatch, seed, capacity, late):
    """Mira at one token: every slot may still be loading at a routing event."""
    run(monkeypatch, type("Fresh", (room.registry.POLICIES["mira"],), {}), capacity, seed, late=late, tokens=1)
