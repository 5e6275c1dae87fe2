"""The native decision against its Python form, bit for bit."""

import logging
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apexk.device.base import active_loads
from apexk.policy.apex import WAVES_GAIN, Apex
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.cost_rates import RateCosts
from apexk.policy.fiddler import SCRATCH_SLOTS
from apexk.policy.native import library
from apexk.policy.native import scan as native
from apexk.policy.scan import choose, choose_ref
from apexk.policy.types import InFlight, RouteView

sys.path.insert(0, str(Path(__file__).parent))
from strategies import affine, rates, views  # noqa: E402

sys.path.pop(0)

#: many ties, and paths that cost nothing
coarse = st.builds(AffineCosts, *[st.sampled_from((0.0, 0.1, 1.0))] * 8, st.booleans())
odd_costs = affine | rates | coarse


@st.composite
def odd_views(draw):
    """Beside those of `views`: more experts, equal loads, large ones, ids in any order, all or none resident, no slot left."""
    ids = draw(st.lists(st.integers(0, 300), unique=True, max_size=40))
    load = draw(st.sampled_from((st.integers(1, 3), st.integers(1, 5000), st.integers(1, 1 << 40))))
    loads = {e: draw(load) for e in ids}
    resident = draw(st.sampled_from((frozenset(), frozenset(ids), frozenset(ids[::2]), frozenset(range(100)))))
    missed = [e for e in ids if e not in resident]
    running = InFlight(draw(st.sampled_from(missed)), draw(st.sampled_from((0.0, 0.3, 1.0)))) if missed and draw(st.booleans()) else None
    return RouteView(0, 0, "prefill", 8, loads, resident, draw(st.sampled_from((0, 1, 3, 40))), draw(odd_costs), running,
                     draw(st.sampled_from((0.0, 0.7))), draw(st.booleans()))


def bits(plan):
    """A plan with its floats as bytes: equal ones need not look alike (0.0 and -0.0)."""
    times = [plan.est_cpu_ms, plan.est_gpu_ms, *(ms for pair in plan.estimates for ms in pair)]
    return plan.gpu_resident, plan.exact_fetch, plan.cpu, len(plan.estimates), struct.pack(f"{len(times)}d", *times)


@settings(max_examples=600, deadline=None)
@given(views(costs=odd_costs) | odd_views(), st.none() | st.integers(0, 5))
def test_the_count_is_the_same(view, limit):
    found = native.decide(view, limit)
    assert found is not None, "built, and nothing to refuse"
    assert found == choose_ref(view, limit) and bits(found) == bits(choose_ref(view, limit))


@settings(max_examples=600, deadline=None)
@given(views(costs=odd_costs) | odd_views(), st.integers(0, 30), st.booleans(), st.booleans())
def test_so_are_waves_and_spills(view, slots, spills, guarded):
    view = replace(view, memory={"guarded": True} if guarded else {"slots": slots} if slots else None)
    limit = 0 if guarded else None
    found = native.decide(view, limit, slots=view.memory.get("slots", 0) if view.memory else 0, scratch=SCRATCH_SLOTS, gain=WAVES_GAIN, spills=spills)
    made = Apex(spills=spills)
    assert bits(found) == bits(made.on_route_ref(view, limit))
    assert made.on_route(view) == found, "and that is what the policy says"


def test_loads_from_a_device_are_read_as_they_are():
    counts = torch.tensor([0, 7, 3, 0, 7, 1], dtype=torch.int32)
    loads = active_loads(counts)
    assert loads == {1: 7, 2: 3, 4: 7, 5: 1} and [struct.unpack("4q", part) for part in loads.packed] == [(1, 2, 4, 5), (7, 3, 7, 1)]
    view = RouteView(0, 0, "decode", 9, loads, frozenset({1}), 9, AffineCosts(0, 0, 0.1, 0, 0.1, 0, 0, 0, False))
    assert choose(view) == choose_ref(replace(view, loads=dict(loads)))
    assert choose(view).exact_fetch == (4, 2), "ms on CPU and link: 1.1 and 0, 0.4 and 0.1, 0.1 and 0.2, 0 and 0.3"


def test_what_it_cannot_read_is_left_to_python(monkeypatch, caplog):
    """Costs of another kind, numbers beyond 64 bits, a copy under way that is not missed; and a library that was not built, which is said once."""

    class Free:
        def cpu_ms(self, experts, pairs):
            return 1.0 * pairs

        def copy_ms(self, copies):
            return 0.0

        gpu_ms = cpu_ms

    view = RouteView(0, 0, "decode", 1, {3: 2, 5: 1}, frozenset({5}), 9, Free())
    assert native.decide(view) is None and choose(view) == choose_ref(view)
    plain = replace(view, costs=RateCosts(1.0, 1.0, 1.0))
    assert native.decide(replace(plain, loads={3: 1 << 70})) is None
    assert native.decide(replace(plain, loads={-3: 1})) is None
    for expert in (5, 9, -1):
        with pytest.raises(ValueError, match=f"in-flight expert {expert} of layer 0 is not a missed expert"):
            choose(replace(plain, in_flight=InFlight(expert, 0.5)))
    monkeypatch.setattr(library, "LIBRARY", Path("/nowhere/scan.so"))
    library.load.cache_clear()
    with caplog.at_level(logging.WARNING, logger="apexk"):
        assert [native.decide(plain), native.decide(plain)] == [None, None] and choose(plain) == choose_ref(plain)
    assert [record.message for record in caplog.records] == ["policies run in Python, which takes several times as long: /nowhere/scan.so is not built"]
    library.load.cache_clear()


def test_a_library_that_is_none_is_left_to_python(monkeypatch, caplog, tmp_path):
    (tmp_path / "scan.so").write_bytes(b"half a file")
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "scan.so")
    library.load.cache_clear()
    plain = RouteView(0, 0, "decode", 1, {3: 2, 5: 1}, frozenset({5}), 9, RateCosts(1.0, 1.0, 1.0))
    with caplog.at_level(logging.WARNING, logger="apexk"):
        assert native.decide(plain) is None and choose(plain) == choose_ref(plain)
    assert "scan.so" in caplog.text and "build it again" in caplog.text
    library.load.cache_clear()


@pytest.mark.parametrize(("slots", "scratch"), [(5, 0), (0, 5), (0, 0)])
def test_no_waves_through_no_slots(slots, scratch):
    """Once a division by zero, which ended the process."""
    costs = AffineCosts(1, 1, 1, 0, 0.1, 0, 0.01, 0, False)
    view = RouteView(0, 0, "prefill", 99, {e: 100 + e for e in range(40)}, frozenset(), 2, costs)
    assert native.decide(view, slots=slots, scratch=scratch) == choose_ref(view)


def test_a_policy_of_ones_own_keeps_its_waves_and_holds():
    class Short(Apex):
        def in_waves(self, view, plan):
            return plan

    class HoldsLight(Apex):
        def holds(self, view):
            return frozenset(range(10))

    costs = AffineCosts(1, 1, 1, 0, 0.1, 0, 0.01, 0, False)
    view = RouteView(0, 0, "prefill", 99, {e: 100 + e for e in range(40)}, frozenset(), 2, costs, memory={"slots": 20})
    copied = [made.on_route(view).exact_fetch for made in (Apex(), Short(), HoldsLight())]
    assert copied[0] == tuple(range(40)), "waves, lightest first"
    assert copied[1] == (39, 38), "no more than fit"
    assert copied[2] == (*range(10, 40), *range(10)), "held ones last"
