"""Experts that are split between GPU and CPU: which pairs each side has, and what becomes of them."""

from dataclasses import replace

import pytest
import torch
from test_against_oracle import PAPER, run_engine, trace
from test_ordering import Unreliable, in_parts
from test_timeline import RULES, SPLITS

import apexk
from apexk.demo import model as demo
from apexk.device.base import Rows, divided_ids
from apexk.device.checked import CheckedDevice
from apexk.policy import kit
from apexk.policy.cost_affine import AffineCosts
from apexk.policy.registry import get
from apexk.timeline import read
from apexk.timeline.writer import Timeline


def test_the_gpus_pairs_are_the_first_in_the_order_of_tokens():
    """By hand: expert 4 has pairs 0, 3 and 5, expert 2 has 1 and 4; 7 is not split."""
    ids = torch.tensor([[4, 2], [7, 4], [2, 4]])
    gpu, cpu = divided_ids(ids, {4: 2, 2: 1}, 9)
    assert gpu.tolist() == [[4, 2], [7, 4], [9, 9]] and cpu.tolist() == [[9, 9], [7, 9], [2, 4]]
    assert ids.tolist() == [[4, 2], [7, 4], [2, 4]]
    gpu, cpu = divided_ids(ids.int(), {4: 0, 2: 2}, -1)  # of a part, one side may have none
    assert gpu.tolist() == [[-1, 2], [7, -1], [2, -1]] and cpu.tolist() == [[4, -1], [7, 4], [-1, 4]]


def test_shares_know_of_their_own_pairs_only():
    rows = Rows(3, 2, loads={4: 3, 2: 2, 7: 1})
    rows.divide({4: 2, 2: 2})
    gpu, cpu = rows.shares
    assert gpu.loads == {4: 2, 2: 2, 7: 1} and cpu.loads == {4: 1, 7: 1} and rows.loads == {4: 3, 2: 2, 7: 1}
    assert (gpu.sides[4], cpu.sides[4], rows.sides[4]) == (("gpu",), ("cpu",), ("gpu", "cpu")) and 7 not in rows.sides


@pytest.mark.parametrize(("changes", "message"), [
    (dict(split=((4, 1),)), "planned for no slot"), (dict(split=((1, 3),)), "leaves pairs to both sides"), (dict(split=((1, 0),)), "leaves pairs to both sides"),
    (dict(split=((1, 1), (1, 2))), "split twice"),
])  # fmt: skip
def test_a_wrong_split_is_refused(changes, message):
    from apexk.policy.check import PlanError, check_plan
    from apexk.policy.types import Plan, RouteView

    view = RouteView(0, 0, "decode", 8, {1: 3, 2: 5, 4: 2}, frozenset({1}), 1, AffineCosts(0, 0, 0.1, 0, 1, 0, 0, 0))
    plan = Plan((1,), (2,), (4,))
    check_plan(view, replace(plan, split=((1, 2), (2, 4))))
    with pytest.raises(PlanError, match=message):
        check_plan(view, replace(plan, **changes))
    with pytest.raises(PlanError, match="copies may come in waves must not"):
        check_plan(view, replace(plan, split=((1, 2),)), waves=True)


@pytest.mark.parametrize("capacity", [1, 6, 24])
def test_each_side_computes_and_is_timed_for_its_own_pairs(capacity):
    """By the rows of the timeline, plan by plan; the observations add up to the same pairs."""
    steps, popularity = trace(2, 33)
    timeline = Timeline(None, keep=True)
    engine = run_engine(SPLITS, capacity, steps, popularity, 33, timeline, settings=RULES[0])
    plans = {(row["step"], row["layer"]): row["decision"] for row in timeline.rows if row["kind"] == "plan"}
    cpu_pairs = 0
    for row in timeline.rows:
        if row["kind"] not in ("host.ffn", "gpu.resident", "gpu.arrived"):
            continue
        decision = plans[row["step"], row["layer"]]
        loads, split = dict(decision["inputs"]["loads"]), dict(decision["choice"]["split"])
        host = row["kind"] == "host.ffn"
        pairs = sum(loads[e] - split.get(e, 0) if host else split.get(e, loads[e]) for e in row["experts"])
        assert row["tokens"] == pairs
        if host:
            cpu_pairs += pairs
            assert row["end_ns"] - row["start_ns"] == round(PAPER.cpu_ms(len(row["experts"]), pairs) * 1e6)
    for place in plans:
        here = [row for row in timeline.rows if (row["step"], row["layer"]) == place]
        written = {name for row in here if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived") for name in row["writes"]}
        (merged,) = (row for row in here if row["kind"] == "combine")
        assert set(merged["reads"]) == written, "the merge waits for both sides of an expert"
    assert cpu_pairs == engine.totals["decode"].cpu_pairs and any(decision["choice"]["split"] for decision in plans.values())


def test_cost_models_learn_from_each_sides_pairs():
    """On a machine that is exactly affine the fit keeps the file's constants, whatever is split; wrong loads would move them."""
    steps, popularity = trace(5, 33)
    engine = run_engine(SPLITS, 24, steps, popularity, 33, settings=RULES[0])
    costs = engine.policy.costs("decode")
    for pairs in (3, 30):
        assert costs.cpu_ms(5, pairs) == pytest.approx(PAPER.cpu_ms(5, pairs), rel=1e-6)
        assert costs.gpu_ms(5, pairs) == pytest.approx(PAPER.gpu_ms(5, pairs, True), rel=1e-6)


def test_in_parts_the_gpus_pairs_are_those_of_the_first_tokens():
    """Of each expert as many as the plan says, over all parts."""
    timeline = Timeline(None, keep=True)
    in_parts(SPLITS, RULES[0], timeline)
    steps, _ = trace(3, 6)
    on_gpu, wanted = {}, {}
    for row in timeline.rows:
        place = row["step"], row["layer"]
        if row["kind"] == "plan":
            choice, loads = row["decision"]["choice"], steps[place[0]][0][place[1]]
            wanted[place] = sum((loads | dict(choice["split"]))[e] for e in (*choice["gpu_resident"], *choice["exact_fetch"]))
        if row["kind"].startswith("gpu"):
            on_gpu[place] = on_gpu.get(place, 0) + row["tokens"]
    assert on_gpu == {place: pairs for place, pairs in wanted.items() if pairs}


@pytest.mark.parametrize("failing", [0.2, 1.0])
def test_a_failed_copy_leaves_all_pairs_to_the_cpu(failing):
    """Also in parts, where later ones know of the failure before they begin."""
    timeline = Timeline(None, keep=True)
    in_parts(SPLITS, RULES[0], timeline, lambda device: CheckedDevice(Unreliable(device, failing=failing)))
    steps, _ = trace(3, 6)
    pairs = {}
    for row in timeline.rows:
        if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived"):
            pairs[row["step"], row["layer"]] = pairs.get((row["step"], row["layer"]), 0) + row["tokens"]
    assert pairs == {(step, layer): sum(steps[step][0][layer].values()) for step, layer in pairs}


def test_kit_covers_splits():
    assert kit.check_policy(lambda: get(SPLITS), traces=60).splits > 0

    class Careless(type(get(SPLITS))):
        def on_route(self, view):
            plan = super().on_route(view)
            return replace(plan, split=tuple((e, view.loads[e]) for e, _ in plan.split))

    with pytest.raises(kit.PolicyFault, match="both sides"):
        kit.check_policy(Careless, traces=60)


@pytest.fixture(scope="module")
def wanted(trained):
    """Tokens of the unpatched model by batch; 33 rows of ragged prompts."""
    model, tokenizer = trained()
    texts = {n: demo.prompts(n, seed=40 + n) for n in (1, 3, 8, 33)}
    return {n: (texts[n], demo.generate(model, tokenizer, texts[n], 6)) for n in texts}


@pytest.mark.parametrize("pool", [0, 1, 4, 16, 32])  # 4 is the model's top-k, 32 its experts
def test_float32_tokens_are_the_unpatched_models(trained, wanted, pool, tmp_path):
    model, tokenizer = trained()
    path = tmp_path / "t.jsonl"
    with apexk.swap(model, apexk.ApexConfig(policy=SPLITS, pool=pool, timeline=path)):
        for texts, tokens in wanted.values():
            assert torch.equal(demo.generate(model, tokenizer, texts, 6), tokens)
    splits = [row["decision"]["choice"]["split"] for row in read(path).rows if row["kind"] == "plan"]
    assert any(splits) == (pool > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_arithmetic_gives_the_same_bits(trained, dtype):
    """Whole and in parts, against a pool of none, which splits nothing."""
    model, tokenizer = trained(dtype)
    batch, found = tokenizer(demo.prompts(5, seed=6), return_tensors="pt", padding=True), []
    for pool, part_tokens in ((0, 2048), (1, 2048), (4, 7), (16, 1), (16, 2048), (32, 31)):
        with apexk.swap(model, apexk.ApexConfig(policy=SPLITS, pool=pool, arithmetic="same", part_tokens=part_tokens)), torch.no_grad():
            found.append(model(**batch).logits)
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_a_failed_copy_costs_no_token(trained, wanted):
    model, tokenizer = trained()
    texts, tokens = wanted[8]
    for part_tokens in (2048, 16):
        with apexk.swap(model, apexk.ApexConfig(policy=SPLITS, pool=6, part_tokens=part_tokens)) as handle:
            handle.engine.device = handle.engine.observer._device = CheckedDevice(Unreliable(handle.engine.device, failing=0.4))
            handle.engine.restart()
            assert torch.equal(demo.generate(model, tokenizer, texts, 6), tokens)
            assert sum(found["failed_copies"] for found in handle.summary().values()) > 0
