"""Trace files: what is written comes back, what is broken is named; demands, popularity and importers against hand counts."""

import json
from dataclasses import replace

import numpy as np
import pytest

from apexk.cli import main
from apexk.sim import importers, popularity, trace
from apexk.sim.demand import counts, demand_of
from apexk.sim.generate import PRESETS, Shape, generate
from apexk.sim.inspect import stats

SMALL = Shape("small", layers=3, experts=16, topk=2)


@pytest.fixture
def small():
    return generate(shape=SMALL, batch=4, steps=6, seed=3)


def test_round_trip(tmp_path, small):
    path = trace.write(small, tmp_path / "a.trace.npz")
    again = trace.read(path)
    assert again.meta == small.meta
    assert again.arrays().keys() == small.arrays().keys()
    assert all((again.arrays()[name] == array).all() and again.arrays()[name].dtype == array.dtype for name, array in small.arrays().items())


def test_a_trace_depends_on_its_seed_alone(small):
    again = generate(shape=SMALL, batch=4, steps=6, seed=3)
    assert all((a == b).all() for a, b in zip(small.arrays().values(), again.arrays().values(), strict=True))
    wider = generate(shape=SMALL, batch=8, steps=2, seed=3)
    assert (wider.profile_counts == small.profile_counts).all(), "the model does not change with the batch"
    assert (generate(shape=SMALL, batch=4, steps=6, seed=4).routed_experts != small.routed_experts).any()


def test_predictions_from_farther_away():
    """They change nothing else, name every layer that has one so far before it, and know less the farther away they are made."""
    shape = Shape("small", layers=6, experts=64, topk=4)
    near, far = (generate(shape=shape, batch=8, steps=20, seed=3, look_ahead=n) for n in (1, 3))
    assert all((array == far.arrays()[name]).all() for name, array in near.arrays().items())
    assert near.ahead_experts is None and far.ahead_experts.shape == (160, 2, 6, 4)
    recall = [(far.routed_experts[:, 3:, :, None] == ids[:, 3:, None, :]).any(-1).mean()
              for ids in (far.predicted_experts, far.ahead_experts[:, 0], far.ahead_experts[:, 1])]
    assert 0.95 > recall[0] > recall[1] + 0.02 > recall[2] + 0.04
    step, rows = demand_of(far).steps[2], slice(16, 24)
    for layer in range(6):
        seen = step.seen_from(layer, 3)
        assert len(seen) == min(3, 5 - layer) and len(step.seen_from(layer)) == min(1, 5 - layer)
        for later, (loads, scores) in enumerate(seen, layer + 1):
            ids = far.predicted_experts[rows, later] if later == layer + 1 else far.ahead_experts[rows, later - layer - 2, later]
            weights = far.predicted_weights[rows, later] if later == layer + 1 else far.ahead_weights[rows, later - layer - 2, later]
            assert loads == {int(e): int((ids == e).sum()) for e in np.unique(ids)}
            assert scores == pytest.approx({int(e): float(weights[ids == e].astype(float).sum()) for e in np.unique(ids)})


def swapped_rows(t):
    return {"step": t.step[::-1].copy()}


def twice(t):
    ids = t.routed_experts.copy()
    ids[0, 0, 1] = ids[0, 0, 0]
    return {"routed_experts": ids}


def beyond(t):
    ids = t.routed_experts.copy()
    ids[5, 1, 0] = 16
    return {"routed_experts": ids}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (beyond, "ids 0..16, wanted 0..15"),
        (twice, "an expert twice"),
        (swapped_rows, "steps are not ordered: row 4 has step 4 after 5"),
        (lambda t: {"request": t.request[::-1].copy()}, "not ordered by"),
        (lambda t: {"phase": t.phase[:-1]}, "phase has shape [23], wanted [T] = [24]"),
        (lambda t: {"step": t.step.astype(np.int64)}, "step is int64, wanted int32"),
        (lambda t: {"phase": t.phase + 1}, "phase holds 2"),
        (lambda t: {"meta": t.meta | {"schema": "apexk.trace/9"}}, "schema is 'apexk.trace/9'"),
        (lambda t: {"meta": t.meta | {"top_k": 3}}, "meta.top_k says 3"),
        (lambda t: {"meta": {k: v for k, v in t.meta.items() if k != "experts"}}, "meta.experts is None"),
        (lambda t: {"profile_counts": t.profile_counts.T}, "profile_counts has shape"),
        (lambda t: {"predicted_experts": np.zeros_like(t.predicted_experts)}, "twice"),
        (lambda t: {"predicted_experts": np.roll(t.predicted_experts, 1, 1)}, "predicted_experts"),
        (lambda t: {"ahead_experts": t.predicted_experts[:, None]}, "ahead_experts from 2 layers before must be -1 below layer 2"),
        (lambda t: {"ahead_experts": t.predicted_experts}, "ahead_experts has shape [24, 3, 2]"),
        (lambda t: {"ahead_experts": np.full((24, 1, 3, 2), -1, np.int16)}, "ahead_experts from 2 layers before holds ids -1..-1"),
        (lambda t: {"ahead_weights": np.zeros((24, 1, 3, 2), np.float16)}, "ahead_weights without ahead_experts"),
    ],
)
def test_a_broken_trace_is_named_with_its_fault(small, fault, said):
    with pytest.raises(trace.TraceError) as error:
        replace(small, **fault(small))
    assert said in str(error.value)


def test_broken_files(tmp_path, small):
    path = tmp_path / "a.trace.npz"
    with pytest.raises(trace.TraceError, match="no trace file"):
        trace.read(path)
    path.write_bytes(b"PK nothing")
    with pytest.raises(trace.TraceError, match="not readable as npz"):
        trace.read(path)
    arrays = small.arrays()
    del arrays["step"]
    np.savez(path.open("wb"), meta=np.array(json.dumps(small.meta)), **arrays)
    with pytest.raises(trace.TraceError, match="step missing"):
        trace.read(path)
    np.savez(path.open("wb"), meta=np.array(json.dumps(small.meta)), colour=np.zeros(1), **small.arrays())
    with pytest.raises(trace.TraceError, match="unknown arrays colour"):
        trace.read(path)
    with pytest.raises(trace.TraceError, match="mixed models"):
        trace.require_same_model([small, generate(shape=replace(SMALL, layers=2), batch=4, steps=6)])


def test_demand_equals_counting_by_hand(small):
    demand = demand_of(small)
    assert len(demand.steps) == 6 and {s.tokens for s in demand.steps} == {4}
    for number, step in enumerate(demand.steps):
        rows = [r for r in range(small.tokens) if small.step[r] == number]
        for layer in range(3):
            wanted, guess, score = {}, {}, {}
            for r in rows:
                for k in range(2):
                    e = int(small.routed_experts[r, layer, k])
                    wanted[e] = wanted.get(e, 0) + 1
                    p = int(small.predicted_experts[r, layer, k])
                    guess[p] = guess.get(p, 0) + 1
                    score[p] = score.get(p, 0.0) + float(small.predicted_weights[r, layer, k])
            assert step.loads[layer] == wanted and list(wanted.values()) and sum(wanted.values()) == 8
            if layer == 0:
                assert step.predicted[0] is None
            else:
                assert step.predicted[layer][0] == guess and step.predicted[layer][1] == pytest.approx(score)


def test_generator_gives_what_it_was_fitted_to():
    """Set sizes and shares of the default preset as its documentation states them, from direct counts."""
    for batch, size in ((8, 21), (16, 27), (24, 31)):
        found = [stats(generate(shape=Shape(layers=20), batch=batch, steps=12, seed=s))["all"] for s in (0, 1)]
        assert np.mean([f["activated"] for f in found]) == pytest.approx(size, rel=0.08)
        if batch == 16:
            for slots, share in ((32, 0.755), (64, 0.584), (96, 0.443)):
                assert np.mean([f[f"cpu_share_{slots}"] for f in found]) == pytest.approx(share, abs=0.025)
            assert np.mean([f["recall"] for f in found]) == pytest.approx(0.82, abs=0.03)
            assert np.mean([f["jaccard"] for f in found]) == pytest.approx(0.34, abs=0.05)
        if batch == 24:
            assert np.mean([f["max_load"] for f in found]) == pytest.approx(22.4, abs=0.6)


def test_presets_differ_as_named():
    base, sticky, diverse = (stats(generate(p, shape=Shape(layers=8), steps=12))["all"] for p in ("mmlu-like", "sticky", "diverse-tokens"))
    assert sticky["reuse"] > base["reuse"] + 0.1
    assert diverse["jaccard"] < base["jaccard"] - 0.1
    assert set(PRESETS) == {"mmlu-like", "sticky", "diverse-tokens"}


def test_popularity_counts_and_finds_overlap(tmp_path, small):
    counted = popularity.count(small, "train")
    assert counted.counts[1][5] == int((small.routed_experts[:, 1] == 5).sum())
    popularity.write(counted, tmp_path / "p.json")
    again = popularity.read(tmp_path / "p.json", model="small", layers=3, experts=16)
    assert again == counted
    assert popularity.overlap(again, small) == 1.0
    assert popularity.overlap(again, generate(shape=SMALL, batch=4, steps=6, seed=9)) == 0.0
    with pytest.raises(ValueError, match="it is of 'small', the trace of 'large'"):
        popularity.read(tmp_path / "p.json", model="large")
    with pytest.raises(ValueError, match="3 layers of 16 experts"):
        popularity.read(tmp_path / "p.json", layers=3, experts=32)


def test_import_request_npz(tmp_path):
    draw = np.random.default_rng(0)
    ids = [np.stack([[draw.permutation(16)[:2] for _ in range(3)] for _ in range(n)]).astype(np.int32) for n in (5, 4)]
    for i, (block, prompt) in enumerate(zip(ids, (3, 2), strict=True)):
        np.savez(tmp_path / f"{i}.npz", routed_experts=block, prompt_token_ids=np.arange(prompt), output_token_ids=np.arange(len(block) - prompt))
    made = importers.from_request_npz([tmp_path / "0.npz", tmp_path / "1.npz"], model="m", experts=16)
    assert made.step.tolist() == [0] * 5 + [1, 1, 2, 2]
    assert made.phase.tolist() == [0] * 5 + [1] * 4
    assert made.request.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 1]
    assert (made.routed_experts[-1] == ids[1][3]).all() and (made.routed_experts[5] == ids[0][3]).all()
    with pytest.raises(trace.TraceError, match="ids 0..15, wanted 0..7"):
        importers.from_request_npz([tmp_path / "0.npz"], model="m", experts=8)
    np.savez(tmp_path / "2.npz", routed_experts=ids[0][:, :2])
    with pytest.raises(trace.TraceError, match="mixed models"):
        importers.from_request_npz([tmp_path / "0.npz", tmp_path / "2.npz"], model="m", experts=16)


def test_import_jsonl(tmp_path, small):
    path = tmp_path / "a.jsonl"
    lines = [
        {"step": int(small.step[t]), "request": int(small.request[t]), "position": int(small.position[t]), "layer": layer + 10,
         "experts": small.routed_experts[t, layer].tolist(), "weights": small.routed_weights[t, layer].tolist()}
        for t in range(small.tokens) for layer in range(3)
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines[::-1]))
    made = importers.from_jsonl(path, model="small", experts=16)
    assert (made.routed_experts == small.routed_experts).all() and (made.routed_weights == small.routed_weights).all()
    assert made.meta["layer_ids"] == [10, 11, 12]
    path.write_text("\n".join(json.dumps(line) for line in lines[:-1]))
    with pytest.raises(trace.TraceError, match="lacks layers"):
        importers.from_jsonl(path, model="small", experts=16)
    path.write_text("{")
    with pytest.raises(trace.TraceError, match="line 1: not JSON"):
        importers.from_jsonl(path, model="small", experts=16)


def test_parquet_round_trip(tmp_path, small):
    pytest.importorskip("pyarrow")
    importers.to_parquet(small, tmp_path / "a.parquet")
    made = importers.from_parquet(tmp_path / "a.parquet", model="small", experts=16)
    assert (made.routed_experts == small.routed_experts).all() and (made.step == small.step).all()


def test_counts_leave_out_what_is_not_there():
    assert counts(np.array([[[0, 2], [-1, -1]]]), 3).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_trace_verb(tmp_path, capsys):
    path = str(tmp_path / "a.trace.npz")
    assert main(["trace", "generate", path, "--steps", "2", "--batch", "2"]) == 0
    assert main(["trace", "stats", path, "--layers", "--json", str(tmp_path / "s.json")]) == 0
    assert len(json.loads((tmp_path / "s.json").read_text())["layers"]) == 40
    assert main(["trace", "popularity", path, str(tmp_path / "p.json"), "--split", "train", "--against", path]) == 0
    assert "not disjoint" in capsys.readouterr().out
    assert main(["trace", "stats", str(tmp_path / "none.trace.npz")]) == 2
    assert "no trace file" in capsys.readouterr().err


def test_samples_ship(capsys):
    assert trace.samples() == ["sample:demo", "sample:mmlu-like"]
    for name in trace.samples():
        found = trace.read(name)
        assert found.tokens > 100 and found.meta["licence"] and found.predicted_experts is not None
    assert main(["simulate", "--trace", "sample:demo", "--pool", "8", "--steps", "12", "--warmup", "2", "--jobs", "1", "--no-references"]) == 0
    with pytest.raises(trace.TraceError, match="sample:demo"):
        trace.read("sample:nothing")
