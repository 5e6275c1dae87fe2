"""The ranges that a tool sees: every launching operation inside one of its kind, the payload as documented."""

from contextlib import contextmanager

import pytest
import torch

import apexk
from apexk.demo import model as demo
from apexk.device.base import At
from apexk.device.ranged import RangedDevice
from apexk.timeline import read


class Recorder:
    """Stands in for `apexk.nvtx.Ranges`."""

    layers = 4

    def __init__(self):
        self.seen, self.depth = [], 0

    @contextmanager
    def __call__(self, kind, layer, payload=0):
        self.depth += 1
        self.seen.append((kind, layer, payload, self.depth))
        try:
            yield
        finally:
            self.depth -= 1


def test_one_range_for_each_operation(trained, tmp_path):
    model, tokenizer = trained()
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 5)
    recorder = Recorder()
    with apexk.swap(model, apexk.ApexConfig(pool=6, timeline=tmp_path / "t.jsonl")) as handle:
        handle.engine.device = RangedDevice(handle.engine.device, recorder)
        assert torch.equal(demo.generate(model, tokenizer, texts, 5), wanted)
    rows = [row for row in read(tmp_path / "t.jsonl").rows if row["kind"] in {"route", "host.ffn", "copy.exact", "gpu.resident", "gpu.arrived", "combine"}]
    ranges = [r for r in recorder.seen if r[0] not in ("predict", "layer", "prefill", "decode")]
    assert [({"host.ffn": "submit"}.get(r["kind"], r["kind"]), r["layer"]) for r in rows] == [(kind, layer) for kind, layer, *_ in ranges]
    assert all(depth == 3 for *_, depth in ranges), "inside a layer inside a pass"
    assert recorder.depth == 0
    for row, (kind, _, payload, _) in zip(rows, ranges, strict=True):
        wanted_payload = {"copy.exact": row["experts"][:1], "route": [row["tokens"]], "combine": [row["tokens"]]}.get(kind, [len(row["experts"])])
        assert [payload] == wanted_payload
    assert sum(r[0] == "predict" for r in recorder.seen) == 3 * 5, "three layers of five passes predict the next one"
    assert [r for r in recorder.seen if r[3] == 1] == [("prefill", 0, 0, 1), *(("decode", 0, step, 1) for step in range(1, 5))]
    assert [r[1:3] for r in recorder.seen if r[0] == "layer"] == [(layer, step) for step in range(5) for layer in range(4)]


@pytest.mark.parametrize("policy", ["apex", "mixtral_offloading"])
def test_parts_of_a_long_input_stay_inside_their_layer(trained, policy):
    model, tokenizer = trained()
    recorder = Recorder()
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=6, part_tokens=8)) as handle:
        handle.engine.device = RangedDevice(handle.engine.device, recorder)
        demo.generate(model, tokenizer, demo.prompts(2), 2)
    merges = [r for r in recorder.seen if r[0] == "combine" and r[1] == 0]
    assert len(merges) > 2 or policy == "mixtral_offloading"
    assert all(depth == 3 for kind, *_, depth in recorder.seen if kind not in ("prefill", "decode", "layer")) and recorder.depth == 0
    assert sum(r[0] == "layer" for r in recorder.seen) == 2 * 4


def test_an_interrupted_pass_leaves_no_range_open():
    class Inner:
        begin_layer = close = lambda *_: None

    recorder = Recorder()
    device = RangedDevice(Inner(), recorder)
    device.begin_layer(At(0, 2, "decode"))
    device.begin_layer(At(1, 0, "decode"))
    assert [r[:3] for r in recorder.seen] == [("decode", 2, 0), ("layer", 2, 0), ("decode", 0, 1), ("layer", 0, 1)]
    assert recorder.depth == 2, "the old ones are closed"
    device.begin_layer(At(1, 0, "decode"))
    assert len(recorder.seen) == 4, "a second part of the same layer opens nothing"
    device.close()
    assert recorder.depth == 0
