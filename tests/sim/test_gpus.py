"""Several modelled GPUs: against one GPU, against the formula, and what further copies may and may not do."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest

import apexk
from apexk import hardware
from apexk.cli import main
from apexk.policy import get
from apexk.policy.check import PlanError
from apexk.policy.replication import Replication
from apexk.policy.types import CostPrior, ModelShape, Prediction
from apexk.sim import run as sim
from apexk.sim.demand import demand_of
from apexk.sim.generate import Shape, generate
from apexk.sim.gpus import SeveralGpus, balanced, level
from apexk.timeline.writer import Timeline

LINK = hardware.load("pinned-link")
SHAPE = Shape(layers=3, experts=32, topk=4)


@pytest.fixture(scope="module")
def demand():
    return demand_of(generate("mmlu-like", shape=SHAPE, batch=48, steps=12, seed=3))


def run(demand, policy, pool, gpus, machine=LINK, **more):
    return sim.simulate(demand, machine, policy, pool, warmup=2, config={"gpus": gpus}, **more)


@pytest.mark.parametrize("policy", ["apex", "no_assign", "ea_only", "sa_only", "replication", "post_fetch", "llamacpp_static32"])
def test_one_of_several_is_one(demand, policy, monkeypatch):
    """The same run, step by step, on the device for several with one GPU."""
    plain = run(demand, policy, 10, 1)
    monkeypatch.setattr(sim, "VirtualDevice", partial(SeveralGpus, gpus=1, policy=None))
    assert run(demand, policy, 10, 1).totals == plain.totals


@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_a_layer_ends_when_its_slowest_gpu_does(demand, gpus):
    """Every expert has a slot: nothing is copied, nothing runs on the CPU, and the time of all steps is the formula's."""
    machine = replace(LINK, layer=replace(LINK.layer, kappa=1.0))
    found = run(demand, "no_assign", 16, gpus, machine)
    ms = 0.0
    for step in demand.steps[2:]:
        for layer, loads in enumerate(step.loads):
            home = {expert: slot % gpus for slot, expert in enumerate(found.engine.policy.initial(layer), layer * SHAPE.experts)}
            experts, pairs = [0] * gpus, [0] * gpus
            for expert, load in loads.items():
                experts[home[expert]] += 1
                pairs[home[expert]] += load
            slowest = max(machine.gpu.g0 + machine.gpu.g1 * n + machine.gpu.g2 * p for n, p in zip(experts, pairs, strict=True) if n)
            ms += machine.layer.o_att + slowest + machine.exchange.e0 + machine.exchange.e1 * max(pairs) * (gpus - 1) / gpus + machine.layer.o_post
    assert found.totals["decode"].step_ms == pytest.approx(ms, rel=1e-5)


@pytest.mark.parametrize(("policy", "pool", "room"), [
    ("replication(further=0.5, theta=1)", 12, 6), ("replication", 12, 1), ("replication(further=0.5)", 4, 2), ("replication", 10, 0), ("apex", 5, 0), ("ea_only", 3, 0),
])  # fmt: skip
def test_every_pair_is_computed_once_and_copies_are_bounded(demand, policy, pool, room):
    timeline, gpus, held = Timeline(None, keep=True), 3, []

    def watch(engine, step, layer):
        for further in engine.device._further.values():
            for gpu in range(gpus):
                held.append(sum(gpu in places for places in further.values()))

    run(demand, policy, pool, gpus, timeline=timeline, watch=watch)
    assert max(held, default=0) <= room and (max(held, default=0) > 0) == (room > 0)
    pairs, lanes = defaultdict(int), defaultdict(list)
    for row in timeline.rows:
        if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived"):
            pairs[row["step"], row["layer"]] += row["tokens"]
        lanes[row.get("gpu", 0) if row["lane"] in ("gpu", "h2d") else 0, row["lane"]].append((row["start_ns"], row["end_ns"]))
    assert pairs == {(n, layer): sum(loads.values()) for n, step in enumerate(demand.steps) for layer, loads in enumerate(step.loads)}
    for spans in lanes.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def test_a_further_copy_is_used_once_it_has_landed(demand):
    """On a link that takes 5 ms an expert, longer than a layer. All GPUs are at the same layer at the same time."""
    timeline, gpus, dense = Timeline(None, keep=True), 3, defaultdict(set)
    found = run(demand, "replication", 12, gpus, replace(LINK, link=replace(LINK.link, t1=5.0)), timeline=timeline)
    home = {(layer, e): slot % gpus for layer in range(SHAPE.layers) for slot, e in enumerate(found.engine.policy.initial(layer), layer * SHAPE.experts)}
    landed = {(row["layer"], row["experts"][0], row.get("gpu", 0)): row["end_ns"] for row in reversed(timeline.rows) if row["kind"] == "copy.spec"}
    elsewhere = 0
    for row in timeline.rows:
        gpu = row.get("gpu", 0)
        if row["kind"] == "attention":
            dense[row["step"], row["layer"]].add((row["start_ns"], row["end_ns"]))
        for expert in row["experts"] if row["kind"].startswith("gpu") else ():
            if home[row["layer"], expert] != gpu:
                assert landed[row["layer"], expert, gpu] <= row["start_ns"]
                elsewhere += 1
    assert elsewhere > 0 and set(map(len, dense.values())) == {1}


def test_further_copies_level_the_gpus(demand):
    """Slots for all experts and four more on each GPU: the busiest GPU has less, and no step takes longer than without."""
    without, with_copies = (run(demand, policy, 12, 4) for policy in ("no_assign", "replication"))
    assert without.engine.device.imbalance > 1.7 > 1.5 > with_copies.engine.device.imbalance
    assert with_copies.totals["decode"].step_ms < without.totals["decode"].step_ms
    assert with_copies.totals["decode"].cpu_pairs == without.totals["decode"].cpu_pairs == 0


def test_level_equals_brute_force():
    draw = random.Random(1)
    for _ in range(300):
        count, pairs, each = draw.randint(1, 4), draw.randint(1, 9), draw.choice((0.5, 1.0, 3.0))
        starts = sorted(draw.choice((0.0, 1.0, 2.5, 7.0, draw.random() * 10)) for _ in range(count))
        ways = [way for way in itertools.product(range(pairs + 1), repeat=count) if sum(way) == pairs]
        best = min(max(start + each * n for start, n in zip(starts, way, strict=True) if n) for way in ways)
        found = level(starts, pairs, each)
        assert sum(found) == pairs and min(found) >= 0 and len(found) == count
        assert max(start + each * n for start, n in zip(starts, found, strict=True) if n) == pytest.approx(best)
    assert level([0.0, 0.0], 3, 0.0) == [3, 0]


def test_an_expert_is_spread_over_its_copies():
    """g1 4, g2 1: expert 0 (20 pairs) on GPUs 0 and 1; 1 (6 pairs) on 0 alone. Of 0, 7 go to GPU 0: 10 + 4 + 5 = 19 and 4 + 15 = 19."""
    machine = replace(LINK, gpu=replace(LINK.gpu, g1=4.0, g2=1.0))
    assert balanced({0: {0, 1}, 1: {0}}, {0: 20, 1: 6}, 2, machine) == [{1: 6, 0: 5}, {0: 15}]
    assert balanced({0: {0, 1}, 1: {0}}, {0: 3, 1: 6}, 2, machine) == [{1: 6}, {0: 3}], "reading the weights twice is dearer"
    assert balanced({0: {2}}, {0: 3}, 3, machine) == [{}, {}, {0: 3}]


def started(further="rest"):
    made = Replication(further=further)
    made.start(ModelShape(2, 16, 2), 16, CostPrior(0, 0, 0.1, 0, 1, 0, 0, 0))
    return made


def test_who_gets_a_further_copy_and_when_it_goes():
    """Expected: 40 of expert 9 and 2 each of seven others: mean 6.75, so above 13.5; shared by two 20, by three 13.3."""
    made = started()
    coming = Prediction({9: 40, **dict.fromkeys(range(7), 2)}, {})
    loads = dict(coming.loads)
    made.on_layer_done(1, 0, "decode", loads)
    assert made.replicate(1, coming, {}) == ([9], []) and made.replicate(1, coming, {9: 1}) == ([9], []) and made.replicate(1, coming, {9: 2}) == ([], [])
    calm = {9: 2, **dict.fromkeys(range(7), 2)}
    for step in range(1, 5):
        assert made.replicate(1, coming, {9: 1, 3: 1})[1] == []
        made.on_layer_done(1, step, "decode", {9: 1, **dict.fromkeys(range(7), 4)})
    assert made.replicate(1, Prediction(calm, {}), {9: 1, 3: 1}) == ([], [9]), "four steps below half of the threshold; 3 was not"


def test_slots_for_further_copies():
    """16 experts on three GPUs are six each."""
    shape = ModelShape(2, 16, 2)
    assert [started().further_slots(shape, pool, 3) for pool in (4, 6, 9)] == [0, 0, 3]
    assert started(0.25).further_slots(shape, 8, 3) == 2 and get("no_assign").further_slots(shape, 8, 3) == 0
    for bad in ("further=2", "further=all"):
        with pytest.raises(ValueError, match="further is"):
            get(f"replication({bad})")


class Careless(Replication):
    def replicate(self, layer, prediction, copies):
        return (0, 0), ()


def test_refusals(demand, capsys):
    with pytest.raises(PlanError, match=r"wants further copies of \(0, 0\)"):
        run(demand, lambda options: Careless(options), 12, 3)
    with pytest.raises(ValueError, match="pinned-link has no section 'exchange'"):
        run(demand, "apex", 12, 3, replace(LINK, exchange=None))
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="gpus is"):
            apexk.ApexConfig(gpus=bad)
    words = ["simulate", "--steps", "4", "--warmup", "1", "--batch", "2", "--jobs", "1", "--policy", "replication", "--set", "gpus=2"]
    assert main(words) == 2 and "add --no-references" in capsys.readouterr().err
    assert main([*words, "--no-references"]) == 0 and "busiest GPU" in capsys.readouterr().out


def test_a_model_runs_with_one(trained):
    model, _ = trained()
    with pytest.raises(ValueError, match="gpus is 2: several GPUs are modelled by apexk simulate"):
        apexk.swap(model, apexk.ApexConfig(gpus=2))
    apexk.swap(model, apexk.ApexConfig(gpus=1)).restore()
