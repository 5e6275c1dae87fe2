"""The transfer count: known answers, brute force over every count, and how it moves with the rates."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexk.policy.check import check_plan
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.cost_rates import RateCosts
from apexk.policy.scan import TIE_MS, by_load, choose, spill, split, unlimited
from apexk.policy.types import InFlight, RouteView

sys.path.insert(0, str(Path(__file__).parent))
from strategies import positive, rates, views  # noqa: E402

sys.path.pop(0)

RESIDENT = 100


def view(missed, resident_load, costs, **changes):
    """One layer with the given missed loads (ids 0..) and one resident expert that carries `resident_load`."""
    loads = dict(enumerate(missed))
    if resident_load:
        loads[RESIDENT] = resident_load
    fields = dict(step=0, layer=0, phase="decode", tokens=16, loads=loads, resident=frozenset({RESIDENT}),
                  available=64, costs=costs, resident_first=False)  # fmt: skip
    return RouteView(**{**fields, **changes})


@pytest.mark.parametrize(
    "missed, resident_load, cpu, gpu, copy, count, cpu_ms, gpu_ms",
    [
        ([9, 7, 5, 3, 2, 1, 1], 40, 8, 100, 2, 2, 1.500, 1.560),
        ([1] * 8, 0, 8, 100, 2, 1, 0.875, 0.510),
        ([14, 9, 8, 7, 6, 5, 5, 4, 4, 4, 3, 3, 2, 1, 1], 52, 23, 113, 1.9, 2, 2.304, 1.716),
        ([30], 0, 10, 200, 1, 1, 0.000, 1.150),
        ([], 64, 10, 200, 1, 0, 0.000, 0.320),
    ],
)
def test_known_answers(missed, resident_load, cpu, gpu, copy, count, cpu_ms, gpu_ms):
    plan = choose(view(missed, resident_load, RateCosts(cpu, gpu, copy)))
    assert plan.transfer_count == count
    assert plan.est_cpu_ms == pytest.approx(cpu_ms, abs=5e-4)
    assert plan.est_gpu_ms == pytest.approx(gpu_ms, abs=5e-4)


def estimate(view, p):
    """(CPU ms, GPU ms) of copying the first `p` missed experts, written as in the module's formula."""
    here, missed = by_load(view)
    loads, costs, m = view.loads, view.costs, len(missed)
    moved = sum(loads[e] for e in missed[:p])
    kept = sum(loads[e] for e in missed[p:])
    resident_load = sum(loads[e] for e in here)
    if p == 0:
        transfer = 0.0
    elif view.in_flight is None:
        transfer = view.channel_wait_ms + costs.copy_ms(p)
    else:
        marginal = costs.copy_ms(2) - costs.copy_ms(1)
        transfer = view.channel_wait_ms + view.in_flight.left * marginal + costs.copy_ms(p - 1)
    alone = costs.gpu_ms(len(here), resident_load)
    everything = costs.gpu_ms(len(here) + p, resident_load + moved)
    gpu = max(alone, transfer) + everything - alone if view.resident_first else transfer + everything
    return costs.cpu_ms(m - p, kept), gpu


@settings(max_examples=400)
@given(views())
def test_without_a_limit_equals_brute_force(view):
    """`unlimited`: as if there were slots for every missed expert, whatever the plan that it starts from was limited to."""
    plan = unlimited(view, choose(view))
    here, missed = by_load(view)
    slower = [max(estimate(view, p)) for p in range(len(missed) + 1)]
    assert (list(plan.gpu_resident), [*plan.exact_fetch, *plan.cpu]) == (here, missed)
    assert (plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx(estimate(view, plan.transfer_count), abs=1e-9)
    assert slower[plan.transfer_count] == pytest.approx(min(slower), abs=1e-9)
    assert plan.transfer_count <= min(p for p, ms in enumerate(slower) if ms <= min(slower) + TIE_MS)


@settings(max_examples=400)
@given(views())
def test_equals_brute_force(view):
    plan = choose(view)
    missed = by_load(view)[1]
    most = min(len(missed), view.available + (view.in_flight is not None))
    slower = [max(estimate(view, p)) for p in range(most + 1)]
    assert max(plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx(min(slower), abs=1e-9)
    assert plan.transfer_count <= min(p for p, ms in enumerate(slower) if ms <= min(slower) + TIE_MS)
    for p, pair in enumerate(plan.estimates):
        assert pair == pytest.approx(estimate(view, p), abs=1e-9)
    assert plan.estimates[plan.transfer_count] == (plan.est_cpu_ms, plan.est_gpu_ms)


def estimate_split(view, p, expert, pairs):
    """(CPU ms, GPU ms) of copying the first `p` missed experts when the GPU has only `pairs` of `expert`'s pairs: as if there were two experts."""
    here, missed = by_load(view)
    loads, costs, left = view.loads, view.costs, view.loads[expert] - pairs
    whole = dict(loads) | {expert: pairs}
    transfer = estimate(replace(view, resident_first=False, costs=replace_gpu(costs)), p)[1]  # the copies' part alone
    alone = costs.gpu_ms(len(here), sum(whole[e] for e in here))
    everything = costs.gpu_ms(len(here) + p, sum(whole[e] for e in (*here, *missed[:p])))
    gpu = max(alone, transfer) + everything - alone if view.resident_first else transfer + everything
    return costs.cpu_ms(len(missed) - p + 1, sum(loads[e] for e in missed[p:]) + left), gpu


def replace_gpu(costs):
    """The same costs with a GPU that takes no time."""

    class Instant:
        cpu_ms, copy_ms = costs.cpu_ms, costs.copy_ms

        def gpu_ms(self, experts, pairs):
            return 0.0

    return Instant()


@settings(max_examples=400)
@given(views(), st.one_of(st.none(), st.integers(0, 12)), st.frozensets(st.integers(0, 11)))
def test_split_equals_brute_force(view, limit, among):
    """Over every number of pairs of the heaviest expert, at `choose`'s count and at one more."""
    whole = choose(view, limit)
    plan = split(view, whole, among, limit)
    check_plan(view, plan)
    here, missed = by_load(view)
    most = min(len(missed), view.available + (view.in_flight is not None), 99 if limit is None else limit)
    found = [max(whole.est_cpu_ms, whole.est_gpu_ms)]
    for p in (whole.transfer_count, whole.transfer_count + 1):
        experts = [e for e in (*here, *missed[:p]) if e in among and view.loads[e] > 1]
        if p <= most and experts:
            heaviest = min(experts, key=lambda e: (-view.loads[e], e))
            found += [max(estimate_split(view, p, heaviest, n)) for n in range(1, view.loads[heaviest])]
    assert max(plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx(min(found), abs=1e-9)
    if plan.split:
        ((expert, pairs),) = plan.split
        assert expert in among and (plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx(estimate_split(view, plan.transfer_count, expert, pairs), abs=1e-9)
        assert max(plan.est_cpu_ms, plan.est_gpu_ms) < found[0] and plan.estimates == whole.estimates
    else:
        assert plan == whole


def test_a_split_at_the_balance_point():
    """The GPU 0.1 ms a pair, the CPU 0.3 ms: of 40 pairs 30 and 10 take 3 ms each; moved whole, the expert would take 4 or 12 ms."""
    seen = view([], 40, AffineCosts(c0=0.0, a=0.0, b=0.3, s0=0.0, t1=0.0, g0=0.0, g1=0.0, g2=0.1))
    plan = split(seen, choose(seen), {RESIDENT})
    assert plan.split == ((RESIDENT, 30),) and (plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx((3.0, 3.0))


def test_a_further_copy_for_part_of_an_expert():
    """A copy takes 1 ms, the GPU 0.1 ms a pair, the CPU 0.2 ms. Left to the CPU 20 pairs take 4 ms, copied 3 ms; with 14 on the GPU 2.4 | 1.2, with 7: 1.7 | 2.6,
    with 10 both 2 ms."""
    seen = view([20], 0, AffineCosts(c0=0.0, a=0.0, b=0.2, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.1))
    assert choose(seen).exact_fetch == (0,)
    plan = split(seen, choose(seen), {0})
    assert plan.exact_fetch == (0,) and plan.split == ((0, 10),)
    dear = replace(seen, costs=replace(seen.costs, g2=0.16))  # copied whole: 4.2 ms, so it is not; 8 pairs there: 2.28 | 2.4
    assert choose(dear).exact_fetch == () and split(dear, choose(dear), {0}).split == ((0, 8),)
    assert split(dear, choose(dear), {0}, limit=0) == choose(dear) and split(dear, choose(dear), ()) == choose(dear)


def test_smallest_count_on_a_tie():
    # The GPU path takes 5 ms with any count, copies are free: one copy is as good as three.
    costs = AffineCosts(c0=1.0, a=0.0, b=0.0, s0=0.0, t1=0.0, g0=5.0, g1=0.0, g2=0.0)
    assert choose(view([4, 3, 2], 8, costs)).transfer_count == 0


@given(views(costs=rates, in_flight=False), st.floats(1.0, 50.0))
def test_a_faster_channel_never_copies_less(view, factor):
    faster = replace(view.costs, copy=view.costs.copy * factor)
    assert choose(replace(view, costs=faster)).transfer_count >= choose(view).transfer_count


@given(views(costs=rates, in_flight=False), st.floats(1.0, 50.0))
def test_a_faster_cpu_never_copies_more(view, factor):
    faster = replace(view.costs, cpu=view.costs.cpu * factor)
    assert choose(replace(view, costs=faster)).transfer_count <= choose(view).transfer_count


@given(views(costs=rates, in_flight=False), positive)
def test_limits_of_the_rates(view, rate):
    no_channel = replace(view, costs=RateCosts(rate, rate, 1e-12))
    assert choose(no_channel).transfer_count == 0
    no_cpu = replace(view, costs=RateCosts(1e-12, rate, rate), available=99)
    assert choose(no_cpu).transfer_count == len(view.missed())


def test_pool_caps_the_count():
    costs = RateCosts(cpu=0.01, gpu=100, copy=100)
    for available in range(5):
        plan = choose(view([5, 4, 3, 2], 0, costs, available=available))
        assert plan.transfer_count == min(4, available)
        assert plan.exact_fetch == (0, 1, 2, 3)[:available]


def test_in_flight_copy_leads_and_costs_its_rest_only():
    costs = AffineCosts(c0=0.0, a=0.0, b=1.0, s0=0.5, t1=2.0, g0=0.0, g1=0.0, g2=0.0)
    plan = choose(view([9, 4, 2], 0, costs, in_flight=InFlight(expert=2, left=0.25), available=0))
    assert plan.exact_fetch == (2,)  # the slot is its own, and nothing else fits
    assert plan.cpu == (0, 1)
    assert plan.est_gpu_ms == pytest.approx(0.25 * 2.0)
    more = choose(view([9, 4, 2], 0, costs, in_flight=InFlight(expert=2, left=0.25)))
    assert more.exact_fetch == (2, 0)
    assert more.est_gpu_ms == pytest.approx(0.25 * 2.0 + 0.5 + 2.0)


def test_wait_for_the_channel_counts_only_with_a_copy():
    costs = RateCosts(cpu=10, gpu=100, copy=10)
    plan = choose(view([5], 0, costs, channel_wait_ms=3.0))
    assert plan.transfer_count == 0
    assert plan.estimates[0][1] == 0.0
    assert plan.estimates[1][1] == pytest.approx(3.0 + 0.1 + 0.05)


def test_in_flight_expert_must_be_missed():
    with pytest.raises(ValueError, match="in-flight expert 7"):
        choose(view([5], 0, RateCosts(1, 1, 1), in_flight=InFlight(7, 0.5)))


@given(views())
def test_spill_is_the_best_split_of_the_residents(view):
    """Brute force over how many of the lightest residents go to the CPU, up to the first that does not help."""
    plan = choose(view, limit=0)
    spilled = spill(view, plan)
    here, loads = list(plan.gpu_resident), view.loads

    def longer(k):
        cpu = [*plan.cpu, *here[len(here) - k :]]
        gpu = here[: len(here) - k]
        return max(view.costs.cpu_ms(len(cpu), sum(loads[e] for e in cpu)), view.costs.gpu_ms(len(gpu), sum(loads[e] for e in gpu)))

    best = 0
    while len(here) > 1 and best < len(here) and longer(best + 1) < longer(best) - 1e-12:
        best += 1
    if plan.est_gpu_ms <= plan.est_cpu_ms:
        best = 0
    assert len(spilled.cpu) == len(plan.cpu) + best
    assert max(spilled.est_cpu_ms, spilled.est_gpu_ms) <= max(plan.est_cpu_ms, plan.est_gpu_ms)
