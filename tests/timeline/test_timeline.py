"""Write and read back; a killed run; every refused field; standard library only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apexk.timeline import SCHEMA, Timeline, TimelineError, read
from apexk.timeline.schema import FIELDS, check_row

FACTS = {"versions": {"apexk": "0"}, "model": {"name": "tiny"}, "config": {}, "hardware": "a6000-paper", "device": "virtual"}
ROW = {
    "step": 0, "layer": 1, "phase": "decode", "kind": "copy.exact", "lane": "h2d", "start_ns": 10, "end_ns": 25, "bytes": 4096,
    "experts": [3], "tokens": 0, "reads": ["host.L1.e3"], "writes": ["slot0"], "modelled": True,
}  # fmt: skip
DECISION = {"policy": "apex", "inputs": {}, "estimates": [[1.0, 0.1]], "choice": {}}
PLAN = {**ROW, "kind": "plan", "lane": "host", "decision": DECISION}


def test_round_trip(tmp_path):
    path = tmp_path / "timeline.jsonl"
    with Timeline(path, keep=True) as timeline:
        assert timeline.active
        timeline.header(**FACTS, note="more")
        timeline.add(**ROW)
        timeline.add(**PLAN)
        assert not path.exists()
    recording = read(path)
    assert recording.header == {"schema": SCHEMA, **FACTS, "note": "more"}
    assert recording.rows == [ROW, PLAN] == timeline.rows
    assert list(tmp_path.iterdir()) == [path]
    timeline.close()


def test_in_memory_and_off():
    kept = Timeline(keep=True)
    kept.add(**ROW)  # no header needed without a file
    assert kept.rows == [ROW]
    off = Timeline(None)
    off.add(**ROW)
    assert not off.active
    with pytest.raises(ValueError, match="keep=True"):
        _ = off.rows


def test_killed_run_leaves_a_readable_prefix(tmp_path):
    path = tmp_path / "timeline.jsonl"
    code = (
        "import os, signal, sys, json; from apexk.timeline import Timeline\n"
        "facts, row = json.loads(sys.argv[2]); t = Timeline(sys.argv[1]); t.header(**facts)\n"
        "for i in range(500): t.add(**{**row, 'step': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, path, json.dumps([FACTS, ROW])], cwd=root)
    assert not path.exists()
    partial = tmp_path / "timeline.jsonl.partial"
    rows = read(partial, partial=True).rows
    assert len(rows) > 100 and [row["step"] for row in rows] == list(range(len(rows)))
    if not partial.read_text().endswith("\n"):
        with pytest.raises(TimelineError, match="partial=True"):
            read(partial)


def test_header_rules(tmp_path):
    timeline = Timeline(tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="lacks hardware, device"):
        timeline.header(versions={}, model={}, config={})
    with pytest.raises(ValueError, match="call header"):
        timeline.add(**ROW)
    timeline.close()
    assert list(tmp_path.iterdir()) == []
    twice = Timeline(keep=True)
    twice.header(**FACTS)
    with pytest.raises(ValueError, match="already has"):
        twice.header(**FACTS)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"kind": "copy"}, "unknown kind 'copy'"),
        ({"lane": "pcie"}, "unknown lane 'pcie'"),
        ({"phase": "train"}, "unknown phase 'train'"),
        ({"end_ns": 9}, "ends before it starts"),
        ({"kind": "plan"}, "carries `decision`"),
    ],
)
def test_writer_refuses(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Timeline(keep=True).add(**{**ROW, **change})


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"step": -1}, "step must not be negative"),
        ({"start_ns": 1.5}, "start_ns must be int, found 1.5"),
        ({"tokens": True}, "tokens must be int, found True"),
        ({"modelled": 1}, "modelled must be bool"),
        ({"experts": 3}, "experts must be a list of int"),
        ({"reads": [3]}, "reads must be a list of str"),
        ({"kind": "copy"}, "unknown kind"),
        ({"end_ns": 9}, "end_ns 9 lies before start_ns 10"),
        ({"kind": "plan", "decision": {"policy": "apex"}}, "inputs, estimates, choice"),
    ],
)
def test_reader_refuses_with_the_line(tmp_path, change, complaint):
    path = tmp_path / "t.jsonl"
    lines = [{"schema": SCHEMA, **FACTS}, ROW, {**ROW, **change}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TimelineError, match=f"t.jsonl, line 3: .*{complaint}"):
        read(path)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_required(field):
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        check_row({key: value for key, value in PLAN.items() if key != field})


@pytest.mark.parametrize(
    "text, complaint",
    [("", "empty"), ("[1]\n", "line 1: the first line must say schema"), ('{"schema": "x/1"}\n', "found 'x/1'"),
     ("{oops\n", "line 1: not JSON")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text, complaint):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TimelineError, match=complaint):
        read(path)


def test_a_full_disk_stops_the_file_and_not_the_run(tmp_path, caplog):
    """The run goes on, an older file stays, and closing says what happened."""
    path = tmp_path / "t.jsonl"
    path.write_text("an older run")
    code = (
        "import resource, signal, sys\n"
        "from apexk.timeline.writer import Timeline\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "t = Timeline(sys.argv[1])\n"
        "t.header(versions={}, model={}, config={}, hardware='h', device='d')\n"
        "for i in range(2000):\n"
        "    t.add(step=i, layer=0, phase='decode', kind='route', lane='gpu', start_ns=0, end_ns=0, modelled=True)\n"
        "try: t.close()\n"
        "except OSError as error: print('said', error)\n"
        "t.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "said" in done.stdout and "t.jsonl" in done.stdout and "File too large" in done.stdout
    assert path.read_text() == "an older run"
    assert (tmp_path / "t.jsonl.partial").exists()
