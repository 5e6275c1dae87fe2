"""Times on CudaDevice over the fake runtime: taken without a wait, of the right layer, on the host's clock."""

import itertools

import pytest

import apexk
from apexk.demo import model as demo
from apexk.timeline import read

NEW_TOKENS = 5
SLOW = dict(delay_us=150, link_gb_s=0.5)  # an expert takes 0.2 ms


def test_timing_adds_no_wait_and_samples_reach_their_layer(trained, fake_gpu, monkeypatch, tmp_path):
    """The host waits once a layer; each layer is learnt from once, in order, with its own copies, kernels and times."""
    model, tokenizer = trained()
    path, waits, seen = tmp_path / "t.jsonl", [], []
    with fake_gpu(**SLOW) as made, apexk.swap(model, apexk.ApexConfig(device="cuda", policy="ea_only", pool=6, timeline=path)) as handle:
        wait, observe = made[0].synchronize_event, handle.engine.policy.observe
        monkeypatch.setattr(made[0], "synchronize_event", lambda event: (waits.append(event), wait(event)))
        monkeypatch.setattr(handle.engine.policy, "observe", lambda phase, sample: (seen.append((phase, sample)), observe(phase, sample)))
        demo.generate(model, tokenizer, demo.prompts(3), NEW_TOKENS)
        handle.summary()
    layers = 4 * NEW_TOKENS
    assert len(waits) == layers
    assert [(phase, sample.layer) for phase, sample in seen] == [("prefill" if i < 4 else "decode", i % 4) for i in range(layers)]
    rows = read(path).rows
    for (_, sample), (step, layer) in zip(seen, itertools.product(range(NEW_TOKENS), range(4)), strict=True):
        mine = [row for row in rows if (row["step"], row["layer"]) == (step, layer)]
        copies = [row for row in mine if row["kind"] == "copy.exact"]
        assert sample.copies == len(copies)
        if copies:
            assert sample.copy_ms == pytest.approx((copies[-1]["end_ns"] - copies[0]["start_ns"]) / 1e6)
            assert all(row["end_ns"] - row["start_ns"] >= 0.19e6 for row in copies), "96 KiB at 0.5 GB/s"
        assert sample.gpu_experts == sum(len(row["experts"]) for row in mine if row["kind"] in ("gpu.resident", "gpu.arrived"))
        (host,) = [row for row in mine if row["kind"] == "host.ffn"] or [None]
        assert sample.cpu_experts == (len(host["experts"]) if host else 0)


def test_copies_of_one_call_are_timed_together(trained, fake_gpu, monkeypatch):
    """Without a timeline, which would want each copy's times: a layer's copies have two events, whatever their number, and nobody learns less."""
    model, tokenizer = trained()
    seen, given = [], []
    with fake_gpu(**SLOW), apexk.swap(model, apexk.ApexConfig(device="cuda", policy="ea_only", pool=6)) as handle:
        copies, observe = handle.engine.device.copies, handle.engine.policy.observe
        exact = copies.exact
        monkeypatch.setattr(handle.engine.policy, "observe", lambda phase, sample: (seen.append(sample), observe(phase, sample)))
        monkeypatch.setattr(copies, "exact", lambda *call: given.append(exact(*call)) or given[-1])
        demo.generate(model, tokenizer, demo.prompts(3), NEW_TOKENS)
        handle.summary()
        assert max(map(len, given)) > 2 and all(len(set(map(id, call))) == 1 for call in given)
        assert sorted(sample.copies for sample in seen if sample.copies) == sorted(map(len, given))
        for sample in seen:
            assert (sample.copy_ms or 0.0) >= 0.19 * sample.copies, "96 KiB each at 0.5 GB/s"
        rate = 25e6  # bytes a millisecond, before the first; the newest of five parts
        for call in given:
            start, end = call[0].span
            rate += 0.2 * (len(call) * copies.bytes * 1e6 / (end - start) - rate)
        assert copies._bytes_per_ms == pytest.approx(rate)


def test_the_device_clock_is_the_hosts(trained, fake_gpu, monkeypatch):
    """An event's time lies between the call that recorded it and the wait for it, but for the width of the narrowest such window of
    a routing event: no layer adds to that."""
    model, tokenizer = trained()
    with fake_gpu(delay_us=300) as made, apexk.swap(model, apexk.ApexConfig(device="cuda", pool=6)) as handle:
        clock, windows = handle.engine.device.clock, []
        set_anchor = clock.set_anchor
        monkeypatch.setattr(clock, "set_anchor", lambda event, before: (set_anchor(event, before), windows.append(clock.now() - before)))
        for _ in range(3):
            demo.generate(model, tokenizer, demo.prompts(1), 3)
            event, before = made[0].new_event(timing=True), clock.now()
            made[0].record(event, made[0].compute_stream())
            made[0].synchronize_event(event)
            off = min(windows) + 50_000  # CUDA's times are 32-bit milliseconds
            assert before - off <= clock.ns(event) <= clock.now() + off
