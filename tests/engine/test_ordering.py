"""The engine's order, checked without a GPU: no two conflicting accesses without an event between them; and the check
itself is checked, by removing each order that the engine asks for and expecting a catch."""

import ast
import importlib
import random
from collections import Counter
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from removals import Removal, reload_without, sites
from test_against_oracle import PAPER, run_engine, trace
from test_deferral import run_deferred
from test_timeline import POLICIES, RULES, SHARED, check_every_pair_once

import apexk.engine
from apexk import hardware
from apexk.device.base import CopyFailed, Rows
from apexk.device.checked import CheckedDevice, OrderError
from apexk.timeline.writer import Timeline

ENGINE = Path(apexk.engine.__file__).parent


class Unreliable:
    """A device whose predictions are late, whose landed copies are noticed late and whose exact copies fail, each at random."""

    def __init__(self, inner, seed=0, late=0.3, failing=0.0):
        self.inner, self._draw, self._late, self._failing = inner, random.Random(seed), late, failing

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def take_prediction(self, ticket):
        return None if self._draw.random() < self._late else self.inner.take_prediction(ticket)

    def done(self, event):
        return self._draw.random() >= self._late and self.inner.done(event)

    def copy_experts(self, at, places, after=()):
        failing = {expert for expert in places if self._draw.random() < self._failing}
        issued = iter(self.inner.copy_experts(at, {expert: slot for expert, slot in places.items() if expert not in failing}, after))
        return [CopyFailed("injected") if expert in failing else next(issued) for expert in places]


def checked(device):
    return CheckedDevice(Unreliable(device))


def run_checked(name, capacity, seed, tokens, rules, wrap=checked, timeline=None):
    steps, popularity = trace(seed, tokens)
    return run_engine(name, capacity, steps, popularity, tokens, timeline, settings=rules, wrap=wrap)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(POLICIES), capacity=st.sampled_from([0, 1, 4, 12, 24, 7]), seed=st.integers(0, 10_000),
    tokens=st.sampled_from([1, 3, 8, 33]), rules=st.sampled_from(RULES + SHARED), failing=st.sampled_from([0.0, 0.2, 1.0]),
)  # fmt: skip
def test_every_run_is_ordered(name, capacity, seed, tokens, rules, failing):
    """70 plans a run, 10,500 in all. Every pair is computed once even where copies fail: the CPU takes their experts."""
    timeline = Timeline(None, keep=True)

    def wrap(device):
        return CheckedDevice(Unreliable(device, seed, failing=failing))

    engine = run_checked(name, capacity, seed, tokens, rules, wrap, timeline)
    check_every_pair_once(trace(seed, tokens)[0], timeline.rows)
    copied = sum(row["kind"] == "copy.exact" for row in timeline.rows)
    assert engine.totals["decode"].exact == copied and (failing < 1 or copied == 0)


def test_checking_changes_nothing():
    steps, popularity = trace(2, 8)
    plain = run_engine("apex", 6, steps, popularity, 8, settings=RULES[0], wrap=Unreliable)
    assert run_checked("apex", 6, 2, 8, RULES[0]).totals == plain.totals


def interrupted(rules):
    """A layer that was submitted and never merged; the next pass starts over."""
    steps, popularity = trace(1, 8)
    engine = run_engine("apex", 6, steps, popularity, 8, settings=rules, wrap=checked)
    engine_layer = importlib.import_module("apexk.engine.layer")
    engine_layer.submit(engine, 0, Rows(tokens=8, topk=4, loads=steps[0][0][0]), "decode")
    engine_layer.join(engine, engine_layer.submit(engine, 0, Rows(tokens=8, topk=4, loads=steps[0][0][0]), "decode"))


def in_parts(policy, rules, timeline=None, wrap=checked, machine=PAPER):
    """Long inputs, each run in five parts that take turns in two buffers. Each expert has tokens in three of them at most."""
    steps, popularity = trace(3, 6)
    engine = run_engine(policy, 6, steps[:1], popularity, 6, timeline, machine, rules, wrap)
    engine_layer = importlib.import_module("apexk.engine.layer")
    for loads, _ in steps[1:4]:
        for layer, whole in enumerate(loads):
            rows = Rows(tokens=6, topk=4, loads=whole)
            for number in range(5):
                part = {e: (n + 2 - turn) // 3 for e, n in whole.items() if (turn := (number - e) % 5) < 3}
                rows.parts.append(Rows(2, 4, loads={e: n for e, n in part.items() if n}, start=2 * number, buffer=number % 2))
            engine_layer.join(engine, engine_layer.submit(engine, layer, rows, "prefill"))


@pytest.mark.parametrize(("machine", "failing"), [("a6000-paper", 0.0), ("pinned-link", 0.2)])  # the second runs no empty CPU path
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_are_ordered_and_copied_for_once(policy, machine, failing):
    """Also where a copy fails whose expert has no tokens in the first part."""
    timeline = Timeline(None, keep=True)
    in_parts(policy, RULES[0], timeline, lambda device: CheckedDevice(Unreliable(device, failing=failing)), hardware.load(machine))
    steps, _ = trace(3, 6)
    key = itemgetter("step", "layer")
    for (step, layer), rows in groupby(sorted(timeline.rows, key=key), key):
        copied, pairs = Counter(), 0
        for row in rows:
            if row["kind"] == "copy.exact":
                copied.update(row["experts"])
            if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived"):
                pairs += row["tokens"]
        assert not copied or max(copied.values()) == 1
        assert pairs == sum(steps[step][0][layer].values())


def test_a_restart_is_ordered():
    interrupted(RULES[0])


class OrderRemoval(Removal):
    """The arguments of all `wait_for` calls and the bare fence statements."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "wait_for":
            node.args = [arg for arg in node.args if not self._hit(_at(arg))]
        return node

    def visit_Expr(self, node):
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "synchronize" and self._hit(_at(call)):
            return ast.copy_location(ast.Pass(), node)
        return node


def _at(node):
    return f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(("path", "number"), sites(sorted(ENGINE.glob("*.py")), OrderRemoval))
def test_each_order_is_needed(path, number, monkeypatch):
    modules = [ENGINE / "runtime.py", ENGINE / "layer.py"]  # the second imports the first
    reload_without(monkeypatch, "apexk.engine", modules, path, OrderRemoval(number))
    with pytest.raises(OrderError):
        for rules in RULES:
            for policy, capacity in (("apex", 6), ("sa_only", 6), ("mixtral_offloading", 5), ("llamacpp_static32", 5), ("post_fetch", 5),
                                     ("post_fetch(sync=true)", 5)):
                run_checked(policy, capacity, 4, 33 if policy.startswith("llama") else 8, rules)
            interrupted(rules)
            in_parts("apex", rules)
            run_deferred(rules)
