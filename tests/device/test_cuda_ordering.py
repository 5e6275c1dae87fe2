"""Each wait, record and fence of the CUDA device is needed: it is found in the source, removed, and something must go wrong.

What goes wrong shows as an error or as other tokens than the unpatched model's, on machines where one stream is slow.
"""

import ast
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cuda_on_fake import fake_gpu
from removals import Removal, reload_without, sites

import apexk
from apexk.demo import model as demo
from apexk.device import cuda, cuda_clock, cuda_copies
from apexk.timeline import read

CALLS = {"wait", "record", "join", "synchronize", "synchronize_event", "synchronize_stream", "settle_first", "collect"}
FILES = [Path(module.__file__) for module in (cuda_clock, cuda_copies, cuda)]  # each imports only the ones before
SPLITS = "apexk.testing.splits:SplitAll"
NEW_TOKENS = 3
TRIES = 4  # of all scenes, when a removal goes by unseen: a busy machine may delay the thread that would have come too early


@dataclass(frozen=True)
class Scene:
    policy: str
    slow: str  # stream
    pool: int = 6
    prompts: int = 3
    part_tokens: int = 2048
    interrupted: bool = False
    transfer: str = "copy_engine"


#: the most telling first
SCENES = [
    Scene("no_assign", "h2d"),
    Scene("apex", "compute"),
    Scene("no_assign", "back", prompts=8, part_tokens=8),
    Scene("ea_only", "h2d"),
    Scene("ea_only", "h2d", transfer="sm_gather"),
    Scene("no_assign", "down"),
    Scene("apex", "side"),
    Scene("no_assign", "back", interrupted=True),
    Scene("mixtral_offloading", "compute", pool=5),
    Scene("post_fetch", "compute", pool=5),
    Scene("no_assign", "start"),
    Scene(SPLITS, "compute"),
    Scene(SPLITS, "back", prompts=8, part_tokens=8),
    Scene(SPLITS, "h2d", interrupted=True),
]
#: sites whose removal no scene shows, and why they stay
PROOFS = {
    "cuda.py:wait:self.hand_off.wait(ticket)": "After an interrupted pass the CPU may still compute its last job. The next pass's first job writes the "
    "same pinned rows, and the CPU kernels begin a job when the tasks of the one before are taken, not done: a task that was taken and then not "
    "scheduled for as long as a job takes would write its stale rows last. No scene makes a CPU task stall that long.",
}


class Stop(Exception):
    pass


class CallRemoval(Removal):
    """The bare calls of CALLS."""

    def visit_Expr(self, node):
        call = node.value
        name = getattr(call.func, "attr", getattr(call.func, "id", None)) if isinstance(call, ast.Call) else None
        if name not in CALLS or "undo" in ast.unparse(node) or not self._hit(f"{name}:{ast.unparse(node)}"):
            return node
        return ast.copy_location(ast.Pass(), node)


@pytest.fixture(scope="module")
def plain(trained):
    model, tokenizer = trained()
    return {n: (texts := demo.prompts(n, seed=40 + n), demo.generate(model, tokenizer, texts, NEW_TOKENS)) for n in (3, 8)}


def play(trained, plain, monkeypatch, path, scene):
    model, tokenizer = trained()
    texts, wanted = plain[scene.prompts]
    config = apexk.ApexConfig(device="cuda", policy=scene.policy, pool=scene.pool, transfer=scene.transfer, timeline=path)
    with fake_gpu(monkeypatch, slow=scene.slow):
        with apexk.swap(model, config) as handle:
            handle.engine.settings = replace(handle.engine.settings, part_tokens=scene.part_tokens)
            if scene.interrupted:
                interrupt(handle, lambda: demo.generate(model, tokenizer, texts, NEW_TOKENS))
            assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted), "other tokens"
            if scene.slow != "back":  # a timeline is whole without it too
                assert handle.summary()["decode"]["layers"] == 4 * (NEW_TOKENS - 1), "layers that nobody learnt from"
    check_times(read(path).rows, scene)


def check_times(rows, scene):
    """Every layer has them, a layer's dense work begins where the merge before it ended, copies take the link's time, and those
    for the next step begin behind the last merge of this one."""
    plans = {(r["step"], r["layer"]) for r in rows if r["kind"] == "plan" and not (scene.interrupted and r["step"] == 0)}
    assert {(r["step"], r["layer"]) for r in rows if r["kind"] == "combine"} >= plans, "layers without times"
    ends = {}
    for row in rows:
        assert row["end_ns"] >= row["start_ns"] >= 0, "times"
        if row["kind"] == "copy.exact" and scene.slow == "h2d":
            assert row["end_ns"] - row["start_ns"] > 1e6, "a copy that took no time"
        if row["kind"] == "combine":
            ends[row["step"], row["layer"]] = row["end_ns"]
    for row in rows:
        before = ends.get((row["step"], row["layer"] - 1)) if row["layer"] else None
        if row["kind"] == "attention" and before is not None:
            assert row["start_ns"] == before, "dense work begins elsewhere than the merge ended"
        if row["kind"] == "copy.spec" and scene.policy == "post_fetch":
            assert row["start_ns"] >= ends[row["step"], max(layer for _, layer in ends)], "a copy for the next step ran into this one"


def interrupt(handle, run):
    """The second layer of a pass ends before its merge, while every stream still has something to do."""
    device, calls = handle.engine.device, []
    combine, runtime = device.combine, device.runtime

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise Stop
        return combine(*arguments)

    device.combine = stop
    with pytest.raises(Stop):
        run()
    del device.combine
    events = [runtime.new_event() for _ in device._streams]
    for event, stream in zip(events, device._streams, strict=True):
        runtime.launch(stream, lambda: time.sleep(0.01))
        runtime.record(event, stream)
    device.synchronize()
    assert all(map(runtime.query, events)), "synchronize returned before everything was done"


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: f"{s.policy}-{s.slow}-{s.transfer}{'-parts' * (s.part_tokens < 100)}{'-interrupted' * s.interrupted}")
def test_every_scene_is_right(trained, plain, monkeypatch, tmp_path, scene):
    play(trained, plain, monkeypatch, tmp_path / "t.jsonl", scene)


@pytest.mark.parametrize(("path", "number"), sites(FILES, CallRemoval))
def test_each_order_is_needed(path, number, trained, plain, monkeypatch, tmp_path, request):
    if request.node.callspec.id in PROOFS:
        pytest.skip(PROOFS[request.node.callspec.id])
    reload_without(monkeypatch, "apexk.device", FILES, path, CallRemoval(number))
    monkeypatch.setattr("cuda_on_fake.cuda", sys.modules["apexk.device.cuda"])
    monkeypatch.setattr("cuda_on_fake.Operation", sys.modules["apexk.device.cuda_clock"].Operation)
    with pytest.raises(Exception):  # noqa: B017 - whatever shows it
        for number_of, scene in enumerate(SCENES * TRIES):
            play(trained, plain, monkeypatch, tmp_path / f"{number_of}.jsonl", scene)
