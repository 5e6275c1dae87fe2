"""Two hand-made layers whose every column is known, the report over them, and the picture."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apexk.timeline import Recording, Timeline, read
from profiling.findings import findings
from profiling.layers import layer_lines
from profiling.plot import layer_timeline
from profiling.report import main, text, title
from profiling.tables import differences, layer_table, phase_totals, to_csv

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"versions": {}, "model": {"name": "toy"}, "config": {"policy": "apex", "pool": 4}, "hardware": "toy-machine", "device": "virtual"}
MS = 1_000_000
CHOICE = {"gpu_resident": [0, 1], "exact_fetch": [2, 3], "cpu": [4, 5, 6]}


def op(layer, kind, lane, start, end, *, step=0, experts=(), tokens=0, bytes=0, **more):
    """A row; times in units of 0.1 ms."""
    return dict(step=step, layer=layer, phase="decode", kind=kind, lane=lane, start_ns=start * MS // 10, end_ns=end * MS // 10,
                experts=list(experts), tokens=tokens, bytes=bytes, reads=[], writes=[], modelled=True, **more)  # fmt: skip


def layer_rows(layer, at, step=0, spec=()):
    """Layer 1 of the picture in `test_columns`, shifted to `at`; `spec` are the speculative copies into it."""
    choice = {"policy": "apex", "inputs": {}, "estimates": [], "choice": CHOICE}
    return [
        op(layer, "attention", "gpu", at, at + 10, step=step),
        op(layer, "route", "gpu", at + 10, at + 10, step=step, tokens=4),
        *spec,
        op(layer, "plan", "host", at + 10, at + 10, step=step, decision=choice),
        op(layer, "host.rows", "cpu", at + 11, at + 12, step=step),
        op(layer, "host.ffn", "cpu", at + 12, at + 30, step=step, experts=[4, 5, 6], tokens=5),
        op(layer, "copy.exact", "h2d", at + 10, at + 18, step=step, experts=[2], bytes=100),
        op(layer, "copy.exact", "h2d", at + 18, at + 26, step=step, experts=[3], bytes=100),
        op(layer, "gpu.resident", "gpu", at + 10, at + 15, step=step, experts=[0, 1], tokens=6),
        op(layer, "gpu.arrived", "gpu", at + 26, at + 33, step=step, experts=[2, 3], tokens=5),
        op(layer, "unattributed", "gpu", at + 33, at + 35, step=step),
        op(layer, "combine", "gpu", at + 35, at + 36, step=step),
    ]


@pytest.fixture
def recording(tmp_path):
    """Two layers in two steps. Layer 1 gets expert 1 in time and loses the copy of expert 9 at its routing event."""
    path = tmp_path / "timeline.jsonl"
    with Timeline(path) as timeline:
        timeline.header(**FACTS)
        for step in range(2):
            at = 100 * step
            spec = [
                op(1, "copy.spec", "h2d", at + 26, at + 40, step=step, experts=[1], bytes=100),
                op(1, "copy.spec", "h2d", at + 40, at + 46, step=step, experts=[9], bytes=43, abandoned=True),
            ]
            for row in layer_rows(0, at, step) + layer_rows(1, at + 36, step, spec):
                timeline.add(**row)
    return path


def tenths(ns):
    return ns * 10 / MS


def test_columns(recording):
    """In 0.1 ms after the layer's start: window 10..36, copies 10..26, kernels 10..15 and 26..33, host 12..30, rows 11..12."""
    first, second = layer_lines(read(recording).rows)[:2]
    assert (first.step, first.layer, first.phase, first.tokens) == (0, 0, "decode", 4)
    times = {
        "critical_ns": 26, "transfer_ns": 16, "exposed_exact_ns": 11, "exposed_wall_ns": 0, "gpu_compute_ns": 12,
        "cpu_compute_ns": 18, "cpu_path_ns": 19, "gpu_path_ns": 23, "overlap_xc_ns": 14, "overlap_gc_ns": 7, "hidden_spec_ns": 0,
        "stall_ns": 11, "idle_ns": 0, "unattributed_ns": 2, "paper_cpu_ns": 18, "paper_gpu_ns": 23, "start_ns": 0, "end_ns": 36,
    }  # fmt: skip
    # 15..26 is exposed to the GPU, and the CPU works through all of it from 12
    assert {name: tenths(getattr(first, name)) for name in times} == times
    assert first.transfer_gbps == pytest.approx(200 / (1.6 * MS))
    assert (first.n_exact, first.n_spec, first.spec_used, first.n_cpu, first.n_resident, first.n_active) == (2, 0, 0, 3, 2, 7)
    assert (first.load_cpu, first.load_gpu, first.last) == (5, 11, "gpu")
    # GPU 10..15, 26..33, 35..36; channel 10..26 and, for the next layer, 26..36; CPU 11..30
    assert (first.gpu_busy, first.channel_busy, first.cpu_busy) == pytest.approx((13 / 26, 26 / 26, 19 / 26))
    # speculation 26..46 hides behind layer 0's host and kernels up to 33 and its own attention from 36
    assert tenths(second.hidden_spec_ns) == 7 + 10
    assert (second.n_spec, second.spec_used, second.transfer_bytes) == (2, 1, 343)


def test_layers_without_work(tmp_path):
    rows = [op(0, "route", "gpu", 0, 1, tokens=1), op(0, "combine", "gpu", 1, 2), op(1, "route", "gpu", 2, 3)]
    (line,) = layer_lines(rows)
    assert (line.last, line.gpu_path_ns, line.transfer_gbps, line.n_resident) == (None, None, None, None)
    assert tenths(line.critical_ns) == 1 and line.transfer_ns == 0


def test_totals(recording):
    totals = phase_totals(read(recording), "decode")
    assert totals["steps"] == 2 and totals["layers"] == 2
    assert totals["ms_per_step"] == pytest.approx(7.2)
    assert totals["tokens_per_s"] == pytest.approx(4 / 7.2e-3)
    assert (totals["paper_cpu_ms"], totals["paper_gpu_ms"], totals["paper_critical_ms"]) == pytest.approx((1.8, 2.3, 2.3))
    assert totals["hit_rate"] == pytest.approx(2 / 7)
    assert totals["spec_used_share"] == pytest.approx(0.5)
    assert totals["gpu_busy"] == pytest.approx((10 + 5 + 7 + 1) / 36)
    assert totals["channel_busy"] == pytest.approx((16 + 36) / 72)
    assert phase_totals(read(recording), "decode", skip=1)["steps"] == 1
    assert phase_totals(read(recording), "prefill") is None
    assert [row["layer"] for row in layer_table(read(recording), "decode")] == [0, 1]


def test_more_totals(recording):
    totals = phase_totals(read(recording), "decode")
    assert (totals["overlap_copy_cpu_ms"], totals["overlap_gpu_cpu_ms"], totals["exposed_wall_ms"]) == pytest.approx((1.4, 0.7, 0.0))
    assert totals["hidden_spec_ms"] == pytest.approx((0 + 1.7) / 2)
    assert totals["copy_gbps"] == pytest.approx((200 + 343) / ((16 + 36) * 1e5))
    assert (totals["last_gpu"], totals["last_cpu"], totals["last_transfer"]) == (1, 0, 0)


def test_idle_is_where_nobody_works():
    """Window 0..10 (0.1 ms): GPU 2..4, CPU 3..5, copies 7..8."""
    rows = [op(0, "route", "gpu", 0, 0, tokens=1), op(0, "gpu.resident", "gpu", 2, 4), op(0, "host.ffn", "cpu", 3, 5),
            op(0, "copy.exact", "h2d", 7, 8, experts=[1]), op(0, "combine", "gpu", 10, 10)]  # fmt: skip
    (line,) = layer_lines(rows)
    assert (tenths(line.idle_ns), tenths(line.stall_ns)) == (6, 8)


def test_parts_of_a_long_input_are_one_layer():
    """Two parts with the same experts: experts count once, pairs and times add up, the window ends with the last merge."""
    rows = [op(0, "route", "gpu", 0, 1, tokens=8)]
    for at in (1, 6):
        rows += [op(0, "gpu.resident", "gpu", at, at + 3, experts=[1, 2], tokens=5), op(0, "host.ffn", "cpu", at, at + 4, experts=[7, 8, 9], tokens=3),
                 op(0, "combine", "gpu", at + 4, at + 5, tokens=4)]  # fmt: skip
    (line,) = layer_lines(rows)
    assert (line.n_cpu, line.n_resident, line.load_cpu, line.load_gpu, line.tokens) == (3, 2, 6, 10, 8)
    assert (tenths(line.critical_ns), tenths(line.gpu_compute_ns), tenths(line.cpu_compute_ns)) == (10, 6, 8)
    seen = [row | {"experts": [], "count": len(row["experts"])} for row in rows]
    assert (layer_lines(seen)[0].n_cpu, layer_lines(seen)[0].n_resident) == (3, 2)


def test_csv_holds_every_line(recording):
    lines = layer_lines(read(recording).rows)
    table = list(csv.DictReader(to_csv(read(recording)).splitlines()))
    assert len(table) == len(lines) == 4
    for row, line in zip(table, lines, strict=True):
        assert row == {name: "" if getattr(line, name) is None else str(getattr(line, name)) for name in row}
        assert {"paper_cpu_ns", "paper_gpu_ns", "idle_ns", "gpu_busy"} <= set(row)


def test_difference_of_two_runs(recording, tmp_path, capsys):
    """The second run is the first one with the CPU's part 0.4 ms shorter in layer 1."""
    other = tmp_path / "other.jsonl"
    rows = [json.loads(text) for text in recording.read_text().splitlines()]
    for row in rows[1:]:
        if row["kind"] == "host.ffn" and row["layer"] == 1:
            row["end_ns"] -= 4 * MS // 10
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed, layers = differences(read(recording), read(other), "decode")
    by_name = {row["what"]: row for row in changed}
    assert by_name["paper_cpu_ms"]["difference"] == pytest.approx(-0.2) and by_name["paper_cpu_ms"]["times"] == pytest.approx(1.6 / 1.8)
    assert by_name["window_ms"]["difference"] == 0
    assert [row["+cpu"] for row in layers] == pytest.approx([0, -0.4]) and layers[1]["cpu"] == pytest.approx(1.5)
    assert main([str(recording), str(other)]) == 0
    assert "decode: b against a" in capsys.readouterr().out
    third = tmp_path / "third.jsonl"
    third.write_bytes(recording.read_bytes())
    assert main([str(recording), str(other), str(third), "--json", str(tmp_path / "all.json")]) == 0
    assert "policy apex, pool 4" in capsys.readouterr().out
    runs = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert [run["phases"]["decode"]["totals"]["paper_cpu_ms"] for run in runs.values()] == pytest.approx([1.8, 1.6, 1.8])
    assert main([str(recording), str(other), str(recording)]) == 2
    assert "twice" in capsys.readouterr().err


COSTS = st.lists(st.tuples(st.sampled_from(["copy.exact", "copy.spec", "gpu.resident", "gpu.arrived", "host.ffn", "host.rows", "attention"]),
                           st.integers(0, 60), st.integers(0, 30)), max_size=14)  # fmt: skip


@given(COSTS, st.integers(0, 20), st.integers(0, 40))
def test_sums_obey_their_identities(work, begin, length):
    """Whatever the intervals: parts are no longer than wholes, and a set is what two disjoint parts of it add up to."""
    lanes = {"copy.exact": "h2d", "copy.spec": "h2d", "host.ffn": "cpu", "host.rows": "cpu"}
    rows = [op(0, kind, lanes.get(kind, "gpu"), start, start + span, experts=[start]) for kind, start, span in work]
    rows += [op(0, "route", "gpu", 0, begin, tokens=1), op(0, "combine", "gpu", begin + length, begin + length)]
    (line,) = layer_lines(rows)
    points = {k: {t for kind, s, n in work if kind == k for t in range(s, s + n)} for k in {kind for kind, *_ in work} | set(lanes) | {"gpu.resident", "gpu.arrived"}}
    window = set(range(begin, begin + length))
    xe, g, c = points["copy.exact"], points["gpu.resident"] | points["gpu.arrived"], points["host.ffn"]
    assert tenths(line.critical_ns) == len(window) == length
    assert tenths(line.exposed_exact_ns) == len((xe & window) - g) and tenths(line.exposed_wall_ns) == len((xe & window) - g - c)
    assert tenths(line.transfer_ns) == len(xe | points["copy.spec"]) <= len(xe) + len(points["copy.spec"])
    assert line.exposed_wall_ns <= line.exposed_exact_ns <= min(line.transfer_ns, line.critical_ns)
    assert line.overlap_xc_ns <= min(line.transfer_ns, line.cpu_compute_ns) and line.cpu_compute_ns <= line.cpu_path_ns
    assert tenths(line.overlap_gc_ns) == len(g & c) == len(g) + len(c) - len(g | c)
    assert line.idle_ns <= line.stall_ns <= line.critical_ns
    assert line.hidden_spec_ns <= line.transfer_ns


def test_findings(recording):
    quiet = read(recording)
    assert findings(quiet) == []
    seen = {"source": "nsys", "operations": 9, "no_call": 2, "outside": 0, "pageable_copies": 3, "pageable_bytes": 3 << 20, "syncs_in_layers": 1,
            "sync_ns": 2_000_000, "open_ranges": 4, "moved_ranges": 0, "overhead_ns": 8 * MS}  # fmt: skip
    found = findings(Recording(quiet.header | {"profile": seen}, quiet.rows))
    assert [next(word for word in ("pinned", "waits", "tool", "dropped", "no end") if word in text) for text in found] == ["pinned", "waits", "tool", "dropped", "no end"]
    assert "3 expert copies (3.0 MiB)" in found[0] and "47 % of the run" in found[2]


def test_report(recording, tmp_path, capsys):
    assert main([str(recording), "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert printed == text(read(recording))
    assert "times modelled on toy-machine" in printed and "decode: 2 steps" in printed
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["phases"]["decode"]["totals"]["steps"] == 2
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "asked"), [(["--skip", "2"], "--skip 2"), (["--skip", "3"], "--skip 3"), (["--phase", "prefill"], "--phase prefill"),
                                              (["--phase", "decode", "--skip", "2"], "--phase decode --skip 2")], ids=str)  # fmt: skip
def test_a_report_of_nothing_is_refused_with_what_there_is(recording, tmp_path, capsys, words, asked):
    """Alone, and beside a run of which something would be left."""
    longer = tmp_path / "longer.jsonl"
    rows = [json.loads(text) for text in recording.read_text().splitlines()]
    more = [row | {"step": row["step"] + at, "phase": phase} for at, phase in ((0, "decode"), (1000, "decode"), (2000, "prefill")) for row in rows[1:]]
    longer.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], *more]))
    for files in ([recording], [longer, recording]):
        assert main([*map(str, files), *words, "--json", str(tmp_path / "out.json")]) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.strip() == f"{asked} leaves nothing of {recording}, which has 2 decode steps"
        assert not (tmp_path / "out.json").exists()
    assert main([str(recording), "--skip", "1"]) == 0 and "decode: 1 steps" in capsys.readouterr().out


def test_picture(recording, tmp_path):
    out = tmp_path / "layer.png"
    layer_timeline(recording, out, steps=(0, 1), title="toy")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and out.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no step 7; there are 0 to 1"):
        layer_timeline(recording, out, steps=7)
    with pytest.raises(ValueError, match="no layer 5; there are 0 to 1"):
        layer_timeline(recording, out, layers=[5])


def test_every_bar_has_a_style():
    from apexk.timeline.schema import KINDS
    from profiling.style import DARK, LIGHT, STYLE

    assert set(KINDS) - set(STYLE) == {"route", "plan", "predict"}  # no bar of their own on the lanes drawn
    assert set(STYLE) == set(LIGHT.faces) == set(DARK.faces)


def test_reports_need_neither_torch_nor_matplotlib():
    code = "import sys, profiling.report; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_lossy_copies_are_in_the_title():
    said = [title(Recording(FACTS | {"config": FACTS["config"] | config}, [])) for config in ({}, {"payload": "plain"}, {"payload": "int4"})]
    assert said[0] == said[1] and "int4 copies (lossy)" in said[2] and "lossy" not in said[0]
