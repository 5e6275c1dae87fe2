"""Trained predictors: their arithmetic against plain loops in float64, bad files, training on structure that is known, splits."""

import json
import math

import numpy as np
import pytest
import torch

from apexk import policy as room
from apexk.cli import main
from apexk.policy import kit, predictor
from apexk.policy.predictor import ARRAYS, DISTANCES, Predictor, read, write
from apexk.policy.types import CostPrior, ModelShape, Prediction, RouteView
from apexk.sim import trace
from apexk.sim.generate import Shape, generate

LAYERS, EXPERTS, TOPK = 3, 12, 2
SIZES = {"L": LAYERS, "E": EXPERTS, "5": 5, "R": 4, "H": 3, "G": 9}
PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)


def made(kind, seed=0, scale=0.5):
    draw = np.random.default_rng(seed)
    arrays = {name: (scale * draw.standard_normal([SIZES[axis] for axis in axes])).astype(np.float32) for name, axes in ARRAYS[kind].items()}
    arrays["at"][:, 0] -= 1.5
    meta = {"schema": predictor.SCHEMA, "kind": kind, "model": "a test", "layers": LAYERS, "experts": EXPERTS, "top_k": TOPK, "distance": DISTANCES[kind]}
    return Predictor(meta, arrays)


@pytest.fixture
def files(tmp_path):
    return {kind: write(made(kind), tmp_path / f"{kind}.npz") for kind in ARRAYS}


def lift(n, tokens):
    return math.log((n + 0.5) / (tokens * TOPK / EXPERTS + 0.5))


def loads(draw, tokens):
    found = {}
    for _ in range(tokens):
        for e in draw.choice(EXPERTS, TOPK, replace=False).tolist():
            found[e] = found.get(e, 0) + 1
    return found


@pytest.mark.parametrize("kind", ARRAYS)
def test_chances_are_those_of_plain_loops_in_double_precision(kind):
    """By the formulas of the module; the gated unit by torch's own cell."""
    one, draw = made(kind), np.random.default_rng(5)
    a = {name: array.astype(np.float64) for name, array in one.arrays.items()}
    one.reset(TOPK)
    seen = [loads(draw, 4) for _ in range(3)]  # of the layer that is predicted, in three steps
    layer, cell = 2, None
    for row in seen:
        one.learn(layer, row)
    named, before = loads(draw, 7), loads(draw, 7)
    if kind == "recurrent":
        cell = torch.nn.GRUCell(1, SIZES["H"]).double()
        with torch.no_grad():
            for name, array in (("weight_ih", a["w_in"][:, None]), ("weight_hh", a["w_state"]), ("bias_ih", a["b_in"]), ("bias_hh", a["b_state"])):
                getattr(cell, name).copy_(torch.from_numpy(array))
    got = one.chances(layer, 7, named, before)
    for e in range(EXPERTS):
        recent, last = 0.0, 0.0
        for row in seen:
            last = lift(row.get(e, 0), 4)
            recent = 0.8 * recent + 0.2 * last
        z = a["at"][layer] @ [1.0, a["standing"][layer, e], lift(named.get(e, 0), 7), last, recent]
        if kind == "linear":
            z += sum(lift(before.get(f, 0), 7) * sum(a["down"][layer, f, r] * a["up"][layer, r, e] for r in range(SIZES["R"])) for f in range(EXPERTS))
        else:
            state = torch.zeros(1, SIZES["H"], dtype=torch.float64)
            for row in seen:
                state = cell(torch.tensor([[lift(row.get(e, 0), 4)]], dtype=torch.float64), state)
            z += float(state[0].detach() @ torch.from_numpy(a["out"]))
        assert got[e] == pytest.approx(1 / (1 + math.exp(-z)), rel=1e-4), e
    assert predictor.active(got, 7) == pytest.approx(sum(1 - (1 - p) ** 7 for p in got.tolist()), rel=1e-5)
    limit = 1.5 * 7 * sum(got.tolist()) / sum(1 - (1 - p) ** 7 for p in got.tolist())
    assert predictor.above(got, 7, 1.5) == sorted((e for e in range(EXPERTS) if 7 * got[e] > limit), key=lambda e: (-got[e], e))


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_file_is_what_was_written(kind, files):
    again = read(files[kind], kind)
    assert again.meta == made(kind).meta and all(np.array_equal(again.arrays[name], made(kind).arrays[name]) for name in ARRAYS[kind])


FAULTS = {
    "schema": lambda meta, arrays: meta.update(schema="x"), "kind": lambda meta, arrays: meta.update(kind="deep"), "meta.experts": lambda meta, arrays: meta.update(experts=0),
    "meta.layers": lambda meta, arrays: meta.update(layers="3"), "distance": lambda meta, arrays: meta.update(distance=1), "model": lambda meta, arrays: meta.pop("model"),
    "wanted at": lambda meta, arrays: arrays.pop("up"), "float32": lambda meta, arrays: arrays.update(up=arrays["up"].astype(np.float64)),
    "not finite": lambda meta, arrays: arrays["down"].fill(np.nan), "overflow": lambda meta, arrays: arrays["at"].fill(1e30), "standing has shape": lambda meta, arrays: meta.update(experts=13),
}  # fmt: skip


@pytest.mark.parametrize("said", FAULTS)
def test_a_bad_file_is_named_with_its_fault(said, tmp_path):
    one, path = made("linear"), tmp_path / "bad.npz"
    FAULTS[said](one.meta, one.arrays)
    np.savez(path, meta=np.array(json.dumps(one.meta)), **one.arrays)
    with pytest.raises(ValueError, match=f"bad.npz.*{said}"):
        room.get(f"mira(predictor={path})")


def test_what_is_no_predictor_of_the_wanted_kind(files, tmp_path):
    (tmp_path / "noise.npz").write_bytes(b"noise")
    np.savez(tmp_path / "bare.npz", up=np.zeros(3))
    for spec, said in ((f"mira(predictor={tmp_path}/none.npz)", "there is no file"), (f"mira(predictor={tmp_path}/noise.npz)", "not readable as a predictor"),
                       (f"mira(predictor={tmp_path}/bare.npz)", "bare.npz"), (f"mira(predictor={files['recurrent']})", "kind 'recurrent', wanted 'linear'"),
                       (f"replication(predictor={files['linear']})", "kind 'linear', wanted 'recurrent'"), ("mira(predictor=3)", "wanted the path"),
                       ("replication(predictor=rnn)", "there is no file")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            room.get(spec)
    for layers, topk in ((4, TOPK), (3, TOPK + 1)):
        with pytest.raises(ValueError, match=f"3 layers of 12 experts, {TOPK} a token"):
            room.get(f"mira(predictor={files['linear']})").start(ModelShape(layers, 12, topk), 4, PRIOR)


def test_both_policies_keep_the_invariants_with_one(files):
    for spec in (f"mira(predictor={files['linear']})", f"mira(miss=cpu, predictor={files['linear']})", f"replication(predictor={files['recurrent']})"):
        assert kit.check_policy(lambda spec=spec: room.get(spec), traces=120, topk=TOPK).traces == 120


def started(spec):
    policy = room.get(spec)
    policy.start(ModelShape(LAYERS, EXPERTS, TOPK), 8, PRIOR, popularity=[list(range(EXPERTS, 0, -1))] * LAYERS)
    return policy


def test_mira_takes_its_farther_layers_experts_from_it_and_the_nearers_from_the_router(files):
    policy, own = started(f"mira(predictor={files['linear']})"), made("linear")
    own.reset(TOPK)
    now, named = {0: 3, 5: 3}, Prediction({7: 2, 8: 4}, {7: 0.5, 8: 0.9})
    policy.on_route(RouteView(0, 0, "decode", 3, now, frozenset(range(8)), 0, policy.costs("decode")))
    assert policy.on_predict(1, named, frozenset()) == (8, 7)
    chances = own.chances(2, 3, named.loads, now)
    wanted = sorted(range(EXPERTS), key=lambda e: (-chances[e], e))[: round(predictor.active(chances, 3))]
    assert policy.on_predict(2, named, frozenset()) == tuple(wanted[: policy.stage_slots]) and policy.predicted[2] == set(wanted)


def test_replication_takes_its_overloaded_from_it(files):
    policy, own = started(f"replication(theta=1, spare=1, predictor={files['recurrent']})"), made("recurrent")
    own.reset(TOPK)
    for step in range(3):
        policy.on_layer_done(1, step, "decode", {step: 4, 9: 4})
        own.learn(1, {step: 4, 9: 4})
    view = RouteView(3, 0, "decode", 4, {1: 4, 2: 4}, frozenset(), 8, policy.costs("decode"), memory=policy.recall(0, "decode", {1: 4, 2: 4}))
    policy.on_route(view)
    wanted = predictor.above(own.chances(1, 4, {3: 4}), 4, 1)
    assert wanted and policy.on_predict(1, Prediction({3: 4}, {}), frozenset()) == tuple(wanted)


def known(steps=160, batch=6, seed=3, layers=4, ahead=False):
    """A trace whose layers from 2 on ask for the experts of two layers before, each shifted by one; routers know nothing."""
    draw = np.random.default_rng(seed)
    base = generate("diverse-tokens", shape=Shape("known", layers, EXPERTS, TOPK), batch=batch, steps=steps, seed=seed, look_ahead=2)
    routed = np.stack([[draw.choice(EXPERTS, TOPK, replace=False) for _ in range(layers)] for _ in range(base.tokens)]).astype(np.int16)
    for layer in range(2, layers):
        routed[:, layer] = (routed[:, layer - 2] + 1) % EXPERTS
    fields = {"routed_experts": routed} | ({} if ahead else {"ahead_experts": None, "ahead_weights": None, "predicted_experts": None, "predicted_weights": None})
    return trace.Trace(**{**vars(base), **fields})


def test_what_depends_on_two_layers_before_is_found(tmp_path, capsys):
    path, out = trace.write(known(), tmp_path / "a.trace.npz"), tmp_path / "p.npz"
    other = trace.write(known(40, seed=9), tmp_path / "b.trace.npz")
    assert main(["train-predictor", str(path), "--out", str(out), "--held-out", str(other), "--rank", "16", "--json", str(tmp_path / "s.json")]) == 0
    shown = capsys.readouterr().out
    scores = {row["name"]: row for row in json.loads((tmp_path / "s.json").read_text())["scores"]}
    assert scores["trained"]["tokens"] > 0.95 > 0.75 > scores["popularity"]["tokens"] and scores["step before"]["tokens"] < 0.75
    assert "router" not in scores and "hold no predictions" in shown and "trained on 160 steps, judged on 40 others" in shown
    assert read(out, "linear").meta["trained"]["steps"] == 160


def test_splits_that_overlap_are_refused(tmp_path, capsys):
    path = trace.write(known(40), tmp_path / "a.trace.npz")
    some = trace.write(trace.first_steps(known(40), 12), tmp_path / "some.trace.npz")
    words = ["train-predictor", str(path), "--out", str(tmp_path / "p.npz")]
    for more, said in ((["--held-out", str(some)], "12 of 12 held-out steps are among the training steps"), (["--held-out-share", "0.01"], "0 steps to hold out"),
                       (["--held-out-share", "1"], "less than 1"), (["--held-out", str(trace.write(known(20, layers=5), tmp_path / "c.trace.npz"))], "mixed models")):  # fmt: skip
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "p.npz").exists()
    two = trace.write(known(40, layers=2), tmp_path / "two.trace.npz")
    assert main(["train-predictor", str(two), "--out", str(tmp_path / "p.npz")]) == 2 and "looks 2 layers ahead, the traces have 2" in capsys.readouterr().err


def test_a_rhythm_that_a_mix_cannot_hold_is_found_by_the_recurrent_kind(tmp_path):
    """Every expert's load comes in the rhythm of four steps: on, on, off, off, in a place of its own, so that the last step alone tells nothing."""
    steps, batch, layers = 120, 6, 2
    draw, base = np.random.default_rng(1), known(steps, batch, layers=layers)
    place, routed = draw.integers(0, 4, (layers, EXPERTS)), np.empty_like(base.routed_experts)
    for row in range(base.tokens):
        for layer in range(layers):
            on = np.flatnonzero((base.step[row] + place[layer]) % 4 < 2)
            routed[row, layer] = draw.choice(on, TOPK, replace=False)
    path, out = trace.write(trace.Trace(**{**vars(base), "routed_experts": routed}), tmp_path / "r.trace.npz"), tmp_path / "s.json"
    assert main(["train-predictor", str(path), "--kind", "recurrent", "--out", str(tmp_path / "p.npz"), "--json", str(out)]) == 0
    scores = {row["name"]: row for row in json.loads(out.read_text())["scores"]}
    assert scores["trained"]["error"] < 0.7 * min(scores[name]["error"] for name in ("popularity", "step before"))
    assert scores["trained"]["tokens"] > scores["step before"]["tokens"] + 0.1
