"""MoE-Lightning by hand: what stays, the order of pages, who gives way; and the wall time that paging ahead saves."""

from dataclasses import replace
from itertools import product

import pytest

from apexk import hardware
from apexk import policy as room
from apexk.policy import kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.layer_stream import pinned
from apexk.policy.types import CostPrior, ModelShape, Prediction, RouteView
from apexk.sim.demand import demand_of
from apexk.sim.generate import Shape, generate
from apexk.sim.run import simulate

COSTS = AffineCosts(c0=0.0, a=0.0, b=0.1, s0=0.0, t1=1.0, g0=0.0, g1=0.0, g2=0.0)


def started(spec="moe_lightning", layers=4, experts=8, capacity=5):
    made = room.get(spec)
    made.start(ModelShape(layers, experts, 2), capacity, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0))
    return made


def test_what_stays_leaves_room_for_the_rest_of_two_layers():
    """Against every share tried: the most whose rest, twice, fits beside it."""
    for layers, experts, capacity in product(range(1, 7), (4, 8, 9), range(10)):
        capacity = min(capacity, experts)
        fits = [w for w in range(capacity + 1) if w * layers + min(2, layers) * (experts - w) <= capacity * layers]
        assert pinned(ModelShape(layers, experts, 2), capacity) == max(fits, default=0)
    assert started().initial(3) == (0, 1) and started("moe_lightning(weights=0.5)").initial(0) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="are 8, and there are 5 slots"):
        started("moe_lightning(weights=1)")
    for bad in ("weights=2", "weights=x", "weights=true"):
        with pytest.raises(ValueError, match="wanted a share"):
            room.get(f"moe_lightning({bad})")


def test_pages_in_order_of_id_whatever_is_predicted():
    made = started()
    view = RouteView(0, 1, "decode", 2, {7: 1, 0: 2, 3: 1}, frozenset({0, 1, 5}), 3, COSTS)
    assert made.on_route(view) == room.Plan((0,), (3, 7), ())
    assert made.on_predict(2, Prediction({7: 9}, {7: 1.0}), frozenset({0, 1, 4})) == (2, 3, 5, 6, 7)


def test_who_is_needed_again_last_gives_way():
    """Layer 2 runs: its own idle pages come again in four layers, those of 1 in three, of 0 in two, of 3 next."""
    made = started()
    everyone = {at: {0, 1, 6, 7} for at in range(4)}
    order = [(at, e) for at in (2, 1, 0, 3) for e in (6, 7)]
    made.on_route(RouteView(0, 2, "decode", 1, {0: 1, 1: 1}, frozenset({0, 1}), 3, COSTS))
    assert list(made.victims_anywhere(2, everyone, 8, 0)) == order
    assert made.victims_anywhere(2, everyone, 9, 0)[8:] == ((2, 0),), "what stays goes when nothing else is left"
    made.on_predict(3, Prediction({}, {}), frozenset())
    assert list(made.victims_anywhere(2, everyone, 99, 0)) == order[:6], "pages replace neither what stays nor pages of the same layer"


@pytest.mark.parametrize("spec", ["moe_lightning", "moe_lightning(weights=0)"])
def test_invariants(spec):
    assert kit.check_policy(lambda: room.get(spec), traces=200).copies > 0


def test_pages_come_while_the_layer_before_runs():
    """With an attention so long that every page comes meanwhile, only the first layer, which none comes before, copies at its routing."""
    demand = demand_of(generate("diverse-tokens", shape=Shape(layers=6, experts=32, topk=4), batch=16, steps=5, seed=1))
    machine = hardware.load("pinned-link")
    machine = replace(machine, layer=replace(machine.layer, o_att=1000.0))
    exact = []

    def watch(engine, step, layer):
        exact.append((layer, engine.totals["decode"].exact - sum(n for _, n in exact)))

    totals = simulate(demand, machine, "moe_lightning", 16, warmup=0, watch=watch).totals["decode"]
    assert all(n == 0 for layer, n in exact if layer) and all(n > 0 for layer, n in exact if not layer)
    stays = pinned(ModelShape(6, 32, 4), 16)
    assert 0 < stays < 16 and totals.cpu_pairs == 0
    assert [n for layer, n in exact if not layer][0] == sum(e >= stays for e in demand.steps[0].loads[0])
