"""What a run's timeline must show, whatever the policy, pool and rules: read from the rows alone."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_against_oracle import LAYERS, PAPER, run_engine, trace

from apexk.engine.runtime import EngineSettings
from apexk.policy import decision_from_dict, get, names
from apexk.timeline import read
from apexk.timeline.writer import Timeline

RULES = [EngineSettings(*rule) for rule in itertools.product((True, False), ("finish", "abort"), ("predicted", "in_use"))]
SHARED = [replace(rules, pool_scope="global") for rules in RULES]
SPLITS = "apexk.testing.splits:SplitAll"
POLICIES = (*names(), SPLITS)


def rows_of(name, capacity, seed, tokens, rules):
    steps, popularity = trace(seed, tokens)
    timeline = Timeline(None, keep=True)
    engine = run_engine(name, capacity, steps, popularity, tokens, timeline, settings=rules)
    return engine, steps, timeline.rows


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(POLICIES), capacity=st.integers(0, 24), seed=st.integers(0, 10_000), tokens=st.sampled_from([1, 2, 8, 40]),
    rules=st.sampled_from(RULES + SHARED),
)  # fmt: skip
def test_every_run(name, capacity, seed, tokens, rules):
    engine, steps, rows = rows_of(name, capacity, seed, tokens, rules)
    check_every_pair_once(steps, rows)
    check_slots(engine, rows)
    check_lanes(rows)
    check_plans(rows)


def check_every_pair_once(steps, rows):
    """Each active expert of a layer is computed once, with all of its rows; one that is split on both sides, with as many as the plan says."""
    done = defaultdict(list)
    pairs = defaultdict(int)
    split = {}
    for row in rows:
        if row["kind"] == "plan":
            split[row["step"], row["layer"]] = [e for e, _ in row["decision"]["choice"]["split"]]
        if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived"):
            done[row["step"], row["layer"]] += row["experts"]
            pairs[row["step"], row["layer"]] += row["tokens"]
    for step, (loads, _) in enumerate(steps):
        for layer in range(LAYERS):
            assert sorted(done[step, layer]) == sorted([*loads[layer], *split[step, layer]])
            assert pairs[step, layer] == sum(loads[layer].values())


def check_slots(engine, rows):
    """A slot is read only while it holds the reader's expert, after its copy has ended, and written only after its readers."""
    holds = {}
    for layer in range(LAYERS):
        first = engine.policy.initial(layer)
        start = len(holds) if engine.shared else layer * engine.slot_count
        for slot, expert in enumerate(first, start):
            holds[f"slot{slot}"] = ((layer, expert), 0)
    read_until = defaultdict(int)
    copies = sorted((r for r in rows if r["kind"].startswith("copy")), key=lambda r: r["start_ns"])
    kernels = [r for r in rows if r["kind"].startswith("gpu")]
    for row in sorted(copies + kernels, key=lambda r: (r["start_ns"], r["kind"].startswith("gpu"))):
        if row["kind"].startswith("copy"):
            (slot,) = row["writes"]
            assert row["start_ns"] >= read_until[slot] and row["start_ns"] >= holds.get(slot, (None, 0))[1]
            holds[slot] = (None if row.get("abandoned") else (row["layer"], row["experts"][0]), row["end_ns"])
            continue
        slots = [name for name in row["reads"] if name.startswith("slot")]
        assert len(slots) == len(row["experts"])
        for slot, expert in zip(slots, row["experts"], strict=True):
            held, since = holds[slot]
            assert held == (row["layer"], expert) and row["start_ns"] >= since
            read_until[slot] = max(read_until[slot], row["end_ns"])


def check_lanes(rows):
    """On each lane one operation at a time; an abandoned copy ends before the next one starts."""
    lanes = defaultdict(list)
    for row in rows:
        lanes[row["lane"]].append((row["start_ns"], row["end_ns"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def check_plans(rows):
    """Fed back from JSON, each decision's inputs give the same plan (replay)."""
    for row in rows:
        if row["kind"] == "plan":
            name, view, plan = decision_from_dict(json.loads(json.dumps(row["decision"])))
            assert get(name).on_route(view) == plan


def test_a_written_timeline_reads_back(tmp_path):
    path = tmp_path / "t.jsonl"
    with Timeline(path, keep=True) as timeline:
        timeline.header(versions={}, model={}, config={}, hardware=PAPER.name, device="virtual")
        steps, popularity = trace(3, 8)
        run_engine("apex", 6, steps, popularity, 8, timeline)
    assert read(path).rows == timeline.rows


@pytest.mark.parametrize("rules", RULES[:4], ids=str)
def test_default_rules_move_running_prefetches(rules):
    """`finish` keeps a needed copy that is under way, and Apex counts on it; `abort` never does."""
    _, _, rows = rows_of("apex", 8, 5, 8, rules)
    offered = sum(r["kind"] == "plan" and r["decision"]["inputs"]["in_flight"] is not None for r in rows)
    assert (offered > 0) == (rules.in_flight == "finish")
    assert rules.in_flight == "finish" or any(r.get("abandoned") for r in rows)


def test_no_assign_moves_no_byte():
    _, _, rows = rows_of("no_assign", 8, 5, 8, RULES[0])
    assert not [r for r in rows if r["kind"].startswith("copy")]


def test_speculative_only_never_makes_the_gpu_wait():
    _, _, rows = rows_of("sa_only", 8, 5, 8, RULES[0])
    assert [r for r in rows if r["kind"] == "copy.spec"] and not [r for r in rows if r["kind"] in ("copy.exact", "gpu.arrived")]
