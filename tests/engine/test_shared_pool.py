"""Slots that any layer may fill (`pool_scope="global"`): what is resident against a cache written anew, order, and refusals."""

import random
from dataclasses import replace

import pytest
from test_against_oracle import EXPERTS, LAYERS, STEPS, run_engine, trace
from test_ordering import checked
from test_timeline import RULES, SHARED, check_every_pair_once, check_lanes, check_slots

import apexk
from apexk import policy as room
from apexk.device.checked import CheckedDevice, OrderError
from apexk.engine.places import OwnPlaces, SharedPlaces
from apexk.engine.runtime import EngineSettings
from apexk.policy.base import Policy
from apexk.policy.evict import RULES as EVICTIONS
from apexk.policy.evict import Belady
from apexk.policy.types import CostPrior, ModelShape, Plan
from apexk.store.slots import slots_of
from apexk.timeline.writer import Timeline

ALL = replace(RULES[0], pool_scope="global")


class FetchAll(Policy):
    """Copies every missed expert that there is a slot for; the CPU has the rest."""

    name = source = "fetch all"
    speculates, fetches, waits_in_flight, evicts = False, True, False, "lru"
    pool_scopes = ("global",)

    def on_route(self, view):
        missed = view.missed()
        return Plan(tuple(e for e in view.loads if e in view.resident), tuple(missed[: view.available]), tuple(missed[view.available :]))


class Ahead(FetchAll):
    """The same with prefetches, and fetched experts are given up after their layer."""

    name = source = "fetch all and ahead"
    speculates, waits_in_flight, keeps_fetched = True, True, False

    def extra_slots(self, capacity):
        return 2

    def on_route(self, view):
        missed = view.missed()
        return Plan(tuple(e for e in view.loads if e in view.resident), tuple(missed[:2]), tuple(missed[2:]))


def lru(steps, popularity, capacity):
    """Hits of a least-recently-used cache of (layer, expert) in `LAYERS * capacity` places, and what it holds at the end."""
    total = LAYERS * capacity
    ranked = [sorted(range(EXPERTS), key=lambda e, row=row: (-row[e], e))[:capacity] for row in popularity]
    held = {(layer, e): -1 for layer in range(LAYERS) for e in ranked[layer]}  # -> when it was used last
    hits = 0
    for step, (loads, _) in enumerate(steps):
        for layer, active in enumerate(loads):
            now = step * LAYERS + layer
            hits += sum((layer, e) in held for e in active)
            missed = sorted((e for e in active if (layer, e) not in held), key=lambda e: (-active[e], e))
            idle = sorted((key for key in held if key[0] != layer or key[1] not in active),
                          key=lambda key: (held[key] // LAYERS if held[key] >= 0 else -1, key[0], popularity[key[0]][key[1]], key[1]))
            missed = missed[: total - len(held) + len(idle)]
            for key in idle[: max(0, len(missed) - (total - len(held)))]:
                del held[key]
            held |= {(layer, e): now for e in missed}
            held |= {(layer, e): now for e in active if (layer, e) in held}
    return hits, set(held)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [0, 1, 6, 12, 24])
def test_residents_are_those_of_one_cache_over_all_layers(monkeypatch, capacity, seed):
    monkeypatch.setattr(room.registry, "get", lambda name, options: FetchAll(options))
    tokens = (1, 8, 33)[seed]
    steps, popularity = trace(seed, tokens)
    engine = run_engine("fetch all", capacity, steps, popularity, tokens, settings=ALL, wrap=CheckedDevice)
    hits, held = lru(steps, popularity, capacity)
    assert engine.totals["decode"].hits == hits
    assert {(layer, e) for layer, slots in enumerate(engine.slots) for e in slots.resident() | slots.loading()} == held


@pytest.mark.parametrize("made", [FetchAll, Ahead])
@pytest.mark.parametrize("rules", SHARED[::3], ids=str)
def test_order_and_slots_of_policies_that_share(monkeypatch, made, rules):
    monkeypatch.setattr(room.registry, "get", lambda name, options: made(options))
    for capacity, seed in ((0, 0), (1, 1), (3, 2), (12, 3), (24, 4)):
        steps, popularity = trace(seed, 8)
        timeline = Timeline(None, keep=True)
        engine = run_engine(made.name, capacity, steps, popularity, 8, timeline, settings=rules, wrap=checked)
        check_every_pair_once(steps, timeline.rows)
        check_slots(engine, timeline.rows)
        check_lanes(timeline.rows)


def whatever_is_free(self):
    """The mutant of `routed`: slots that were given up in this layer count as unread."""
    self._unread = type("Everything", (set,), {"intersection": lambda self, free: set(free), "difference_update": lambda *_: None})()


def whoever(self, layer, active, predictions, step, ahead=SharedPlaces.ahead):
    """The mutant of `ahead`: experts that the layer runs may go."""
    return ahead(self, layer, (), predictions, step)


@pytest.mark.parametrize(("made", "name", "mutant"), [(Ahead, "routed", whatever_is_free), (None, "ahead", whoever)])
def test_a_prefetch_into_a_slot_that_is_read_is_caught(monkeypatch, made, name, mutant):
    monkeypatch.setattr(SharedPlaces, name, mutant)
    if made:
        monkeypatch.setattr(room.registry, "get", lambda name, options: made(options))
    steps, popularity = trace(3, 8)
    with pytest.raises(OrderError, match="slot"):
        for capacity in (1, 3, 6):
            run_engine("apex", capacity, steps, popularity, 8, settings=replace(ALL, prefetch_protects="in_use"), wrap=checked)


def test_experts_that_wait_for_their_layer_are_spared():
    """What was copied ahead for a later layer gives its slot to no other layer before that is routed."""
    shape = ModelShape(LAYERS, EXPERTS, 4)
    policy = room.get("apex")
    policy.start(shape, 2, CostPrior(1, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1))
    slots = slots_of(LAYERS, 2, shared=True)
    for first in slots:
        for expert in (0, 1):
            slot = first.free()[0]
            first.begin(expert, slot, None)
            first.land(expert)
    places = SharedPlaces(slots, policy, "predicted", {3: [0], 4: [1]})
    assert places.available(1, {0, 5}) == 10 - 3
    taken = places.take(1, list(range(2, 9)), {0, 5}, step=0)
    assert len(set(taken)) == 7
    assert [sorted(s.resident()) for s in slots] == [[], [0], [], [0], [1]]
    assert OwnPlaces(slots, policy, "predicted", {}).available(4, ()) == 7 + 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["apex", "mixtral_offloading", "moe_lightning", "hybrimoe"])
def test_prefetches_of_a_pass_that_went_no_further(name, seed):
    """Passes that end between two layers, and passes that take turns: what they had queued writes no slot that another layer has by
    now, and nothing comes twice."""
    steps, popularity = trace(seed, 8)
    draw = random.Random(seed)
    for scope in room.get(name).pool_scopes:
        for capacity in (1, 3):
            run_engine(name, capacity, steps, popularity, 8, settings=EngineSettings(pool_scope=scope), wrap=checked,
                       order=[draw.randrange(LAYERS) for _ in range(40)])


def test_experts_that_wait_for_their_layer_go_where_nothing_else_could():
    """Every slot holds what a later layer waits for: waves of the one that runs still get one."""
    policy = room.get("apex")
    policy.start(ModelShape(3, 8, 2), 1, CostPrior(1, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1))
    slots = slots_of(3, 1, shared=True)
    for expert in range(3):
        slots[2].begin(expert, expert, None)
        slots[2].land(expert)
    places = SharedPlaces(slots, policy, "predicted", {2: [0, 1, 2]})
    assert places.available(0, {5, 6}) == 3 and len(places.take(0, [5, 6], {5, 6}, step=0)) == 2
    assert places.available(0, ()) == 2, "free ones, and then the third is spared again"


@pytest.mark.parametrize("rule", [*EVICTIONS, "belady"])
def test_keys_order_a_layers_experts_as_the_rule_does(rule):
    """`lowest` within one layer, against the smallest keys."""
    draw = random.Random(5)
    uses = [sorted(draw.sample(range(40), 6)) for _ in range(EXPERTS)]
    popularity = [draw.randint(1, 50) for _ in range(EXPERTS)]
    made = Belady(uses, 0.5, popularity) if rule == "belady" else EVICTIONS[rule](EXPERTS, 0.5, popularity)
    for step in range(STEPS):
        candidates = draw.sample(range(EXPERTS), 10)
        keys = sorted(made.keys(2, candidates, step))
        assert made.lowest(candidates, 4, step) == tuple(key[-1] for key in keys[:4])
        made.update(step, {e: draw.randint(1, 9) for e in draw.sample(range(EXPERTS), 5)})


def test_victims_of_equal_worth_over_all_layers():
    """Layers that have run in this step are as of the next one: their decayed worth counts."""
    policy = room.get("apex(evict=utility, utility_decay=0.5)")
    policy.start(ModelShape(3, 4, 1), 2, CostPrior(1, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1))
    for layer, load in enumerate((8, 4, 3)):
        policy.on_layer_done(layer, 0, "decode", {0: load})
    policy.on_layer_done(0, 1, "decode", {1: 5})
    # as of each layer's next run: layer 0 (ran in step 1): 8/4 = 2 and 5/2; layer 1, running in step 1: 4/4 = 1; layer 2: 3/2
    assert policy.victims_anywhere(1, {0: {0, 1}, 1: {0}, 2: {0}}, 3, 1) == ((1, 0), (2, 0), (0, 0))


@pytest.mark.parametrize("name", room.names())
def test_who_may_share(name):
    policy = room.get(name)
    own = (type(policy).victims, type(policy).victims_for) != (Policy.victims, Policy.victims_for)
    assert not ("global" in policy.pool_scopes and (policy.posts or own)), "it would choose without knowing what other layers have"
    for scope in ("layer", "global"):
        if scope in policy.pool_scopes:
            assert apexk.ApexConfig(policy=name, pool_scope=scope).pool_scope == scope
        else:
            with pytest.raises(ValueError, match=f"pool_scope is '{scope}', but policy '{name}'"):
                apexk.ApexConfig(policy=name, pool_scope=scope)


def test_bad_scopes():
    with pytest.raises(ValueError, match="there are layer, global"):
        apexk.ApexConfig(pool_scope="model")


def test_placements_over_all_layers():
    """Six layers of 8 experts with 3 slots each: two layers whole and two slots over."""
    shape, prior = ModelShape(6, 8, 2), CostPrior(1, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    counts = [[(layer * 5 + e * 3) % 17 for e in range(8)] for layer in range(6)]

    def first(spec):
        policy = room.get(spec)
        policy.start(shape, 3, prior, counts)
        return [len(policy.initial(layer)) for layer in range(6)], [policy.initial(layer) for layer in range(6)]

    assert first("n_cpu_moe")[0] == [0, 0, 0, 0, 8, 8]
    assert first("n_cpu_moe(layers=5)")[0] == [0, 0, 0, 0, 0, 8]
    assert first("kt_static(placement=front)")[0] == [8, 8, 2, 0, 0, 0]
    sizes, chosen = first("fiddler_original")
    least = min(counts[at][e] for at in range(6) for e in chosen[at])
    left = max(counts[at][e] for at in range(6) for e in range(8) if e not in chosen[at])
    assert sum(sizes) == 18 and least >= left
    with pytest.raises(ValueError, match=r"6 layers x 3 slots hold the 8 experts of 2 layers: wanted 4\.\.6"):
        first("n_cpu_moe(layers=3)")
    with pytest.raises(ValueError, match="whole number"):
        room.get("n_cpu_moe(layers=x)")

