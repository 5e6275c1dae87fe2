"""The kit over every policy, the kit's own teeth, specs and plug-ins, and each policy's rule by hand."""

import sys
import textwrap

import pytest

from apexk import policy as room
from apexk.policy import Plan, Policy, kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.scan import by_load
from apexk.policy.types import CostPrior, ModelShape, Prediction, RouteView

SPECS = (*room.names(), "apex(cost=rates)", "apex(evict=lru)", "apex(evict=lfu)", "apex(evict=least_stale)", "ea_only(cost=rates)",
         "hybrimoe(prefetch=2)", "post_fetch(sync=true)", "fiddler_original(threshold=10)", "mixtral_offloading(k=2)", "mira(miss=cpu)", "mira(hot=1, every=2)")  # fmt: skip
PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)


@pytest.mark.parametrize("spec", SPECS)
def test_invariants(spec):
    seen = kit.check_policy(lambda: room.get(spec), traces=120)
    assert seen.traces == 120 and seen.layers == 120 * 9 and seen.pairs > 0


@pytest.mark.nightly
@pytest.mark.parametrize("spec", room.names())
def test_invariants_over_ten_thousand_traces(spec):
    assert kit.check_policy(lambda: room.get(spec), traces=10_000, seed=1, experts=9, layers=2, steps=2).traces == 10_000


class Honest(Policy):
    name, source, speculates, fetches, waits_in_flight = "honest", "a test", True, True, True

    def on_route(self, view):
        here, missed = by_load(view)
        count = 1 if view.available or view.in_flight else 0
        return Plan(tuple(here), tuple(missed[:count]), tuple(missed[count:]))


class Loses(Honest):
    def on_route(self, view):
        plan = super().on_route(view)
        return Plan(plan.gpu_resident, plan.exact_fetch, plan.cpu[1:])


class Overfills(Honest):
    def on_route(self, view):
        here, missed = by_load(view)
        return Plan(tuple(here), tuple(missed), ())


class Forgets(Honest):
    calls = 0

    def on_route(self, view):
        self.calls += 1
        here, missed = by_load(view)
        return Plan(tuple(here), (), tuple(missed)) if self.calls % 7 else super().on_route(view)


class EvictsAnything(Honest):
    def victims(self, layer, candidates, count, step):
        return tuple(range(count))


class PrefetchesResidents(Honest):
    def on_predict(self, layer_next, prediction, resident):
        return tuple(prediction.loads)


class Remembers(Honest):
    last = -1

    def on_route(self, view):
        here, missed = by_load(view)
        return Plan(tuple(here), (), tuple(missed)) if self.last == view.step else super().on_route(view)

    def on_layer_done(self, layer, step, phase, loads):
        super().on_layer_done(layer, step, phase, loads)
        self.last = step


class Sneaks(Honest):
    fetches = False


def test_the_kit_passes_an_honest_policy():
    assert kit.check_policy(Honest, traces=50).copies > 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [(Loses, "not planned"), (Overfills, "exact copies for"), (Forgets, "another plan"), (Remembers, "fresh policy"), (EvictsAnything, "victims"),
     (PrefetchesResidents, "queue"), (Sneaks, "does not fetch, and fetches")],
)  # fmt: skip
def test_the_kit_finds(bad, said):
    with pytest.raises(kit.PolicyFault, match=said):
        kit.check_policy(bad, traces=50)


def test_the_kit_asks_what_the_engine_asks_of_a_class():
    bare = type("Bare", (Policy,), {"on_route": Honest.on_route})
    both = type("Both", (Honest,), {"waits_in_flight": False})
    for made, said in ((bare, "'Bare' does not say name, source"), (both, "'Both' fetches and prefetches, so it must set waits_in_flight")):
        with pytest.raises(kit.PolicyFault, match=said):
            kit.check_policy(made, traces=1)


def test_specs_and_plug_ins(tmp_path, monkeypatch):
    assert room.get("fixed_p(p=7)").p == 7 and room.get("fixed_p(p=7)").name == "fixed_p(p=7)"
    assert room.get("apex(cost=rates, utility_decay=0.5)").options.utility_decay == 0.5
    for spec, said in (("apex(p=1)", "takes no p; it takes .*cost"), ("fixed_p(p=-1)", "p is -1"), ("apex(cost", "closing"), ("apex(x)", "key=value"),
                       ("nowhere:X", "No module named 'nowhere'"), ("apexk.policy:Nothing", "Nothing"), ("apexk.policy:Plan", "no subclass"),
                       ("post_fetch(sets=x)", "sets is 'x'"), ("post_fetch(sync=1)", "sync is 1"), ("hybrimoe(look_ahead=4)", "look_ahead is 4")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            room.get(spec)
    source = """
        from apexk.policy import Plan, Policy
        class Mine(Policy):
            name, source, speculates, fetches, waits_in_flight = "mine", "a test", False, False, False
            def on_route(self, view):
                missed = view.missed()
                return Plan(tuple(sorted(view.loads.keys() - set(missed))), (), tuple(missed))
    """
    (tmp_path / "my_policies.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    assert room.get("my_policies:Mine").name == "my_policies:Mine"
    assert kit.check_policy(lambda: room.get("my_policies:Mine"), traces=20).traces == 20
    monkeypatch.delitem(sys.modules, "my_policies")


def view(loads, resident, available=99, *, tokens=1, phase="decode", memory=None, costs=None, resident_first=True):
    costs = costs or AffineCosts(c0=1.0, a=0.1, b=0.05, s0=0.2, t1=0.5, g0=0.1, g1=0.0, g2=0.0)
    return RouteView(0, 0, phase, tokens, loads, frozenset(resident), available, costs, memory=memory, resident_first=resident_first)


def started(spec, experts=16, capacity=4, layers=2):
    made = room.get(spec)
    made.start(ModelShape(layers, experts, 2), capacity, PRIOR, popularity=[list(range(experts, 0, -1))] * layers)
    return made


def test_fixed_count_takes_the_heaviest():
    plan = room.get("fixed_p(p=2)").on_route(view({0: 1, 1: 5, 2: 3, 3: 5, 4: 9}, {4}))
    assert (plan.gpu_resident, plan.exact_fetch, plan.cpu) == ((4,), (1, 3), (2, 0))
    assert room.get("fixed_p(p=2)").on_route(view({0: 1, 1: 5, 2: 3}, (), available=1)).exact_fetch == (1,)
    # CPU: 1 + 0.1*2 + 0.05*4; GPU: copies 0.2 + 0.5*2; the kernel's 0.1 is paid by the residents
    assert (plan.est_cpu_ms, plan.est_gpu_ms) == pytest.approx((1.4, 1.2))


def test_fiddler_threshold():
    """Released: more than 10 tokens. By costs: 0.1 + 0.05*n > 0.5 from n = 9 on."""
    loads = {0: 8, 1: 9, 2: 10, 3: 11, 4: 2}
    assert set(room.get("fiddler_original").on_route(view(loads, {4})).exact_fetch) == {1, 2, 3}
    assert set(room.get("fiddler_original(threshold=10)").on_route(view(loads, {4})).exact_fetch) == {3}
    assert room.get("fiddler_static").on_route(view(loads, {4})).exact_fetch == ()


@pytest.mark.parametrize(("tokens", "llama", "ik"), [(31, 0, 0), (32, 1, 0), (255, 1, 0), (256, 1, 1)])
def test_batch_thresholds(tokens, llama, ik):
    """32 tokens; and tokens * 2 >= 32 * 16, so 256 tokens."""
    for spec, fetches in (("llamacpp_static32", llama), ("ik_static", ik)):
        plan = started(spec).on_route(view({0: tokens, 5: tokens}, {0}, available=0, tokens=tokens, memory={"experts": 16, "topk": 2}))
        assert plan.gpu_resident == (0,) and plan.exact_fetch == ((5,) if fetches else ()) and plan.cpu == (() if fetches else (5,))


def test_mixtral_offloading_computes_nothing_on_the_cpu():
    made = started("mixtral_offloading(k=1)", capacity=0)
    assert made.extra_slots(0) == 4 and made.extra_slots(3) == 1 and made.extra_slots(9) == 0
    assert made.on_route(view({1: 2, 2: 3, 7: 1}, {7})).exact_fetch == (2, 1)
    assert made.on_predict(1, Prediction({3: 1, 4: 2}, {}), frozenset()) == (4,)
    for step, used in enumerate(({1: 1, 2: 1}, {2: 1, 3: 1}, {1: 1, 3: 1})):
        made.on_layer_done(0, step, "decode", used)
    assert made.victims(0, {1, 2, 3}, 2, 3) == (2, 3), "least recently used first; of 1 and 3 the less popular"


def test_post_fetch_copies_the_misses_after_the_step():
    made = started("post_fetch", capacity=2)
    for layer, resident in ((0, {0, 1}), (1, {0, 1})):
        loads = {0: 1, 5: 2, 6: 9, 7: 3} if layer == 0 else {1: 4, 9: 1}
        plan = made.on_route(RouteView(0, layer, "decode", 4, loads, frozenset(resident), 2, made.costs("decode")))
        assert plan.exact_fetch == ()
        made.on_layer_done(layer, 0, "decode", loads)
    assert made.on_step_done(0) == ((0, 6), (0, 7), (1, 9)), "heaviest first, at most as many as slots"
    assert made.on_step_done(1) == ()
    assert made.victims_for(0, (6, 7), {0, 1}, 1) == (1, 0), "1 was not used in the step, 0 was"
    made.on_route(RouteView(1, 0, "prefill", 4, {8: 1}, frozenset(), 2, made.costs("prefill")))
    assert made.on_step_done(1) == (), "a prefill posts nothing"


def test_post_fetch_sets():
    made = started("post_fetch(sets=2)", capacity=4)
    assert made.initial(0) == (0, 2, 1, 3), "the most popular of each set"
    made.on_layer_done(0, 0, "decode", {0: 1, 1: 1})
    assert made.victims_for(0, (5, 7, 9), {0, 1, 2, 3}, 1) == (3, 1)
    with pytest.raises(ValueError, match="equal sets"):
        started("post_fetch(sets=3)", capacity=4)


def test_hybrimoe_deals_from_both_ends():
    """By hand. GPU kernel 0.1 once; copies 0.7, then 0.5 more each; CPU 1 + 0.1*n + 0.05*pairs.

    Order by load, residents first: 4 (9, resident), 1 (8), 2 (3), 3 (1). 4: GPU 0.1 <= CPU with 3's pair 1.15. 1: 0.7 <= 1.15.
    2: max(0.7, 1.2) = 1.2 > 1.15, so the CPU takes 3. 2: GPU 1.2 <= CPU 1 + 0.2 + 0.2 = 1.4.
    """
    plan = room.get("hybrimoe").on_route(view({1: 8, 2: 3, 3: 1, 4: 9}, {4}))
    assert (plan.gpu_resident, plan.exact_fetch, plan.cpu) == ((4,), (1, 2), (3,))
    slow_gpu = AffineCosts(c0=0.0, a=0.1, b=0.0, s0=0.0, t1=9.0, g0=0.0, g1=1.0, g2=0.0)
    plan = room.get("hybrimoe").on_route(view({1: 5, 2: 4}, {1, 2}, costs=slow_gpu))
    assert plan.cpu == (2, 1), "the CPU may take a resident"


def test_freetoken_fetches_the_recent_ones():
    """m = 4, one token each: CPU 1 + 0.4 + 0.2 = 1.6, copies 2.2: q*m = 4 * 1.6/3.8 = 1.68. One copy: max(0.7, 1.45); two: max(1.2, 1.3)."""
    loads = {1: 1, 2: 1, 3: 1, 4: 1}
    memory = {"last_active": [[1, 5], [2, 7], [3, 7], [4, 6]]}
    plan = room.get("freetoken_q").on_route(view(loads, (), memory=memory))
    assert (plan.exact_fetch, plan.cpu) == ((2, 3), (1, 4))
    assert room.get("freetoken_q").on_route(view(loads, (), memory=memory, phase="prefill")).cpu == ()
    assert room.get("freetoken_q").on_route(view(loads, (), available=0, memory=memory)).exact_fetch == ()


def test_dali_assigns_by_load_and_corrects_its_predictions():
    """1 (8): GPU 0.7 <= CPU 1.5. 2 (3): GPU 1.2 <= CPU 1.25. 3 (1): GPU 1.7 > CPU 1.15."""
    made = started("dali")
    plan = made.on_route(view({1: 8, 2: 3, 3: 1}, ()))
    assert (plan.exact_fetch, plan.cpu) == ((1, 2), (3,))
    for step in range(40):
        made.on_predict(1, Prediction({6: 4, 7: 5}, {}), frozenset())
        made.on_layer_done(1, step, "decode", {6: 9, 8: 2})
    assert made.on_predict(1, Prediction({6: 4, 7: 5}, {}), frozenset()) == (6, 8), "6 is worth 9, 8 was never predicted, 7 never came"


def test_eviction_rules():
    uses = [[0, 5], [1], [2, 3], []]
    from apexk.policy.evict import RULES, Belady

    assert Belady(uses, 0.9).lowest({0, 1, 2, 3}, 4, 2) == (1, 3, 0, 2), "never again (equal utility, lower id), then 5, then 2"
    popularity = [1, 1, 2, 1]
    for rule, wanted in (("lru", (3, 0, 2, 1)), ("lfu", (3, 0, 1, 2)), ("least_stale", (3, 0, 2, 1))):
        history = RULES[rule](4, 0.9, popularity)
        for step, loads in enumerate(({0: 9, 2: 1}, {2: 1, 1: 1}, {1: 1, 2: 1}, {1: 1})):
            history.update(step, loads)
        assert history.lowest({0, 1, 2, 3}, 4, 4) == wanted, rule
    with pytest.raises(ValueError, match="unknown eviction rule 'dice'"):
        started("apex(evict=dice)")
    with pytest.raises(ValueError, match="replay only"):
        started("apex(evict=belady)")


@pytest.mark.parametrize("spec", ["apex", "dali", "hybrimoe", "mixtral_offloading"])
def test_an_expert_on_its_way_takes_no_other_experts_slot(spec):
    """One free slot and one copy on its way: at most one new copy, whether or not the one on its way is taken."""
    from apexk.policy import check_plan
    from apexk.policy.types import InFlight

    cheap_copies = AffineCosts(c0=9.0, a=5.0, b=1.0, s0=0.0, t1=0.01, g0=0.0, g1=0.0, g2=0.0)
    for flying in (1, 2, 3):
        seen = view({1: 9, 2: 5, 3: 1}, (), available=1, costs=cheap_copies)
        seen = RouteView(**{**vars(seen), "in_flight": InFlight(flying, 0.9)})
        plan = started(spec).on_route(seen)
        check_plan(seen, plan, room.get(spec).waves)
