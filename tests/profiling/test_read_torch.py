"""Traces of real torch.profiler runs on the CPU against our own timeline and the raw file; device events are added to one by hand,
in Kineto's words, since there is no GPU."""

import gzip
import json
import threading
from decimal import Decimal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import apexk
from apexk.cli import main
from apexk.demo import model as demo
from apexk.device.ranged import RangedDevice, TorchRanges
from apexk.timeline import Recording, read
from profiling.attribution import ProfileError
from profiling.layers import layer_lines
from profiling.load import load
from profiling.merge import complete

ALL_THREADS = torch.profiler._ExperimentalConfig(profile_all_threads=True)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory, trained):
    """(trace, timeline) of three passes of the demo's model."""
    folder = tmp_path_factory.mktemp("torch")
    model, tokenizer = trained()
    with apexk.swap(model, apexk.ApexConfig(pool=6, timeline=folder / "timeline.jsonl")) as handle:
        handle.engine.device = RangedDevice(handle.engine.device, TorchRanges(4))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            demo.generate(model, tokenizer, demo.prompts(2), 3)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return folder / "trace.json", folder / "timeline.jsonl"


def test_a_real_run_has_the_timelines_operations(swapped):
    """Same layers, kinds, experts and tokens, in the same order; host times instead of modelled ones."""
    trace, timeline = swapped
    kinds = ("route", "copy.exact", "gpu.resident", "gpu.arrived", "combine")
    wanted = [row for row in read(timeline).rows if row["kind"] in kinds]
    found = [row for row in load(trace).rows if row["kind"] in kinds]
    assert [_what(row) for row in found] == [_what(row) for row in wanted]
    assert not any(row["modelled"] for row in found)
    ours, theirs = layer_lines(read(timeline).rows), layer_lines(load(trace).rows)
    for name in ("step", "layer", "phase", "tokens", "n_exact"):
        assert [getattr(line, name) for line in theirs] == [getattr(line, name) for line in ours], name


def _what(row):
    experts = row["experts"] if row["kind"] == "copy.exact" else row.get("count", len(row["experts"]))
    return row["step"], row["layer"], row["phase"], row["kind"], experts, row["tokens"] if row["kind"] in ("route", "combine") else 0


def test_windows_are_exact_to_the_nanosecond(swapped):
    """From the raw text, as decimals: from the end of `route` to the end of `combine`."""
    trace, _ = swapped
    events = json.loads(trace.read_text(), parse_float=Decimal)["traceEvents"]
    ends = {(word, i): round((e["ts"] + e["dur"]) * 1000) for word in ("route", "combine")
            for i, e in enumerate(e for e in events if e.get("cat") == "user_annotation" and f"/{word} " in e["name"])}  # fmt: skip
    lines = layer_lines(load(trace).rows)
    assert len(lines) == 12 == len(ends) / 2
    assert [line.critical_ns for line in lines] == [ends["combine", i] - ends["route", i] for i in range(12)]


def test_gzip(swapped, tmp_path):
    trace, _ = swapped
    zipped = tmp_path / "trace.json.gz"
    zipped.write_bytes(gzip.compress(trace.read_bytes()))
    assert load(zipped).rows == load(trace).rows


@pytest.fixture
def threads(tmp_path):
    """A real trace of one layer whose CPU experts run on another thread."""
    ranges, x = TorchRanges(1), torch.ones(64, 64)

    def worker():
        with ranges("host.ffn", 0, 3):
            x @ x

    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as profiler:
        with ranges("decode", 0, 5), ranges("layer", 0, 5):
            with ranges("route", 0, 2):
                x @ x
            with ranges("submit", 0, 3):
                other = threading.Thread(target=worker)
                other.start()
            with ranges("gpu.resident", 0, 4):
                x @ x
            other.join()
            with ranges("combine", 0, 2):
                x @ x
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_other_threads(threads):
    recording = load(threads)
    assert sorted((row["kind"], row["lane"]) for row in recording.rows) == [("combine", "host"), ("gpu.resident", "host"), ("host.ffn", "cpu"), ("route", "host")]
    assert len({row["thread"] for row in recording.rows}) == 2
    (line,) = layer_lines(recording.rows)
    assert (line.step, line.tokens, line.n_cpu, line.n_resident) == (5, 2, 3, 4)
    assert 0 < line.cpu_compute_ns < line.critical_ns


def test_device_events_go_to_the_range_of_their_call(threads):
    """A kernel and a copy from pageable memory, called inside `gpu.resident`, one copy inside `submit`, one wait."""
    trace = json.loads(threads.read_text())
    spans = {e["name"].split("/")[-1].split(" ")[0]: e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"}
    ran = spans["gpu.resident"]

    def call(number, name, of=ran, offset=0.001):
        return dict(ph="X", cat="cuda_runtime", name=name, pid=of["pid"], tid=of["tid"], ts=of["ts"] + offset, dur=0.001, args={"correlation": number})

    def device(number, cat, name, start, dur, **more):
        return dict(ph="X", cat=cat, name=name, pid=0, tid=7, ts=ran["ts"] + start, dur=dur, args={"correlation": number, "stream": 7, **more})

    submit = spans["submit"]
    trace["deviceProperties"] = [{"id": 0, "name": "a GPU"}]
    trace["traceEvents"] += [
        call(1, "cudaLaunchKernel"), device(1, "kernel", "gemm", 10, 4),
        call(2, "cudaMemcpyAsync", submit), device(2, "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1, 2, bytes=640),
        call(3, "cudaStreamSynchronize"), device(9, "kernel", "lost", 11, 1),
        dict(ph="X", cat="overhead", name="Buffer Flush", pid=1, tid=1, ts=1, dur=2.5, args={}),
    ]  # fmt: skip
    threads.write_text(json.dumps(trace))
    recording = load(threads)
    rows = {row["kind"]: row for row in recording.rows if row["lane"] in ("gpu", "h2d")}
    assert set(rows) == {"gpu.resident", "host.rows"}
    assert rows["gpu.resident"]["end_ns"] - rows["gpu.resident"]["start_ns"] == 4000 and rows["gpu.resident"]["count"] == 4
    assert (rows["host.rows"]["bytes"], rows["host.rows"]["lane"]) == (640, "h2d")
    facts = recording.header["profile"]
    assert (facts["no_call"], facts["syncs_in_layers"], facts["overhead_ns"], facts["pageable_copies"]) == (1, 1, 2500, 0)
    assert recording.header["device"] == "a GPU"


def test_a_timeline_completes_a_trace(tmp_path, trained):
    """Device "cpu": its CPU experts run on native threads, which torch.profiler does not see; both clocks are the host's."""
    model, tokenizer = trained()
    with apexk.swap(model, apexk.ApexConfig(pool=0, device="cpu", timeline=tmp_path / "timeline.jsonl")) as handle:
        handle.engine.device = RangedDevice(handle.engine.device, TorchRanges(4))
        demo.generate(model, tokenizer, demo.prompts(1), 2)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            demo.generate(model, tokenizer, demo.prompts(1), 3)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace, timeline = load(tmp_path / "trace.json"), read(tmp_path / "timeline.jsonl")
    assert all(line.cpu_compute_ns == 0 for line in layer_lines(trace.rows))
    both = complete(trace, timeline)
    ours = {(line.step, line.layer): line for line in layer_lines(timeline.rows)}
    lines = layer_lines(both.rows)
    assert len(lines) == 12 and {line.step for line in lines} == {2, 3, 4}
    for line in lines:
        own = ours[line.step, line.layer]
        assert (line.cpu_compute_ns, line.n_cpu, line.load_cpu, line.n_active) == (own.cpu_compute_ns, own.n_cpu, own.load_cpu, own.n_active)
    assert both.header["profile"]["from_timeline"] == ["host.ffn", "plan"] and both.header["config"]["policy"] == "apex"
    assert main(["report", str(tmp_path / "trace.json"), "--timeline", str(tmp_path / "timeline.jsonl")]) == 0


def test_clocks_are_laid_over_each_other():
    """By hand: the profile's clock is 1000 ns ahead; the middle of three differences counts."""

    def routed(step, end):
        return {"step": step, "layer": 0, "kind": "route", "start_ns": end, "end_ns": end, "modelled": False}

    copied = {"step": 2, "layer": 0, "kind": "copy.exact", "start_ns": 205, "end_ns": 290, "modelled": False}
    header = {"config": {}, "model": {}}
    timeline = Recording(header, [routed(1, 100), routed(2, 200), routed(3, 300), routed(9, 900), copied, copied | {"step": 9}])
    ours = Recording(header | {"profile": {}}, [routed(1, 1100), routed(2, 1230), routed(3, 1297)])
    both = complete(ours, timeline)
    assert [(row["start_ns"], row["end_ns"]) for row in both.rows if row["kind"] == "copy.exact"] == [(1205, 1290)]
    assert both.header["profile"]["clock_spread_ns"] == 3
    seen = Recording(ours.header, [*ours.rows, copied])
    assert len([row for row in complete(seen, timeline).rows if row["kind"] == "copy.exact"]) == 1, "what the profile has is not doubled"
    with pytest.raises(ProfileError, match="share 1 layers"):
        complete(Recording(ours.header, ours.rows[:1]), timeline)


def test_a_modelled_timeline_completes_nothing(swapped):
    trace, timeline = swapped
    with pytest.raises(ProfileError, match="times are modelled"):
        complete(load(trace), read(timeline))
    assert main(["report", str(timeline), "--timeline", str(timeline)]) == 2


def test_wrong_files_are_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"schemaVersion": 1, "events": []}')
    with pytest.raises(ProfileError, match="without a list `traceEvents`"):
        load(path)
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}')
    with pytest.raises(ProfileError, match="no range that begins with 'apexk/'"):
        load(path)
    path.write_text('{"traceEvents": [')
    with pytest.raises(ProfileError, match="is no JSON"):
        load(path)
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ValueError, match="the first line must say schema 'apexk.timeline/1'"):
        load(path)
