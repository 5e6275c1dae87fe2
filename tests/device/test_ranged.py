"""The ranges that a tool sees: every launching operation inside one of its kind, the payload as documented."""

from contextlib import contextmanager

import torch

import apexk
from apexk.demo import model as demo
from apexk.device.ranged import RangedDevice
from apexk.timeline import read


class Recorder:
    """Stands in for `apexk.nvtx.Ranges`."""

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
    ranges = [r for r in recorder.seen if r[0] != "predict"]
    assert [(r["kind"], r["layer"]) for r in rows] == [(kind, layer) for kind, layer, *_ in ranges]
    assert all(depth == 1 for *_, depth in ranges)
    for row, (kind, _, payload, _) in zip(rows, ranges, strict=True):
        wanted_payload = {"copy.exact": row["experts"][:1], "route": [row["step"]], "combine": [row["step"]]}.get(kind, [len(row["experts"])])
        assert [payload] == wanted_payload
    assert sum(r[0] == "predict" for r in recorder.seen) == 3 * 5, "three layers of five passes predict the next one"
