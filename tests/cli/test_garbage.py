"""Files that are not what they are given as: one line that names the file, whatever is in it."""

import gzip
import json
import random
import sqlite3

import numpy as np
import pytest

from apexk import cli
from apexk.inputs import reading

#: what is given garbage: the words, F standing for the file; the file's name; a table or object of the kind that is wanted, in part
TAKERS = {
    "report": (["report", "F"], "f.jsonl"),
    "report of an export": (["report", "F"], "f.sqlite"),
    "report of a trace": (["report", "F"], "f.json"),
    "explain": (["explain", "--timeline", "F", "--step", "0", "--layer", "0"], "f.jsonl"),
    "stats": (["trace", "stats", "F"], "f.trace.npz"),
    "popularity": (["simulate", "--trace", "sample:demo", "--popularity", "F", "--jobs", "1"], "f.json"),
    "hardware": (["explain", "--hardware", "F", "--step", "0", "--layer", "0"], "f.json"),
    "import of npz": (["trace", "import", "F", "--model", "m", "--experts", "8", "--out", "o.trace.npz"], "f.npz"),
    "import of lines": (["trace", "import", "F", "--model", "m", "--experts", "8", "--out", "o.trace.npz"], "f.jsonl"),
    "import of parquet": (["trace", "import", "F", "--model", "m", "--experts", "8", "--out", "o.trace.npz"], "f.parquet"),
    "prompts": (["run", "--file", "F"], "f.jsonl"),
    "prompts in a table": (["run", "--file", "F"], "f.csv"),
    "prompts in parquet": (["run", "--file", "F"], "f.parquet"),
    "rows": (["kernels", "bench", "--table", "F"], "f.jsonl"),
    "rows to draw": (["kernels", "plot", "F", "o.png"], "f.jsonl"),
    "baseline": (["kernels", "bench", "cpu_ffn/*", "--tokens", "1", "--baseline", "F"], "f.jsonl"),
    "template": (["serve", "--chat-template", "F"], "f.jinja"),
}  # fmt: skip


def sqlite(path):
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE t (a INTEGER)")
    database.commit()
    database.close()
    return path.read_bytes()


def broken_zip(path):
    """Its archive is whole, an array in it is not."""
    np.savez_compressed(path, routed_experts=np.arange(600).reshape(100, 2, 3))
    raw = bytearray(path.read_bytes())
    raw[80:200] = bytes(120)
    return bytes(raw)


GARBAGE = {
    "nothing": lambda path: b"",
    "noise": lambda path: random.Random(3).randbytes(4096),
    "half a character": lambda path: b'{"a": "\xe4',
    "nested too deep": lambda path: b"[" * 100_000,
    "a number": lambda path: b"3\n",
    "null": lambda path: b"null\n",
    "an empty object": lambda path: b"{}\n",
    "lists": lambda path: json.dumps({name: [[], None] for name in ("schema", "rows", "traceEvents", "experts", "layer", "counts", "prompt", "question")}).encode() + b"\n",
    "zipped noise": lambda path: gzip.compress(b"{")[:-9],
    "a database": lambda path: sqlite(path.with_name("made.sqlite")),
    "half a database": lambda path: sqlite(path.with_name("made.sqlite"))[:3000],
    "a broken archive": lambda path: broken_zip(path.with_name("made.npz")),
}
#: a table of prompts has no form that these would break
FINE = {("prompts in a table", "nested too deep"), *(("template", what) for what in GARBAGE)} - {("template", "noise"), ("template", "half a character")}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("taker", TAKERS)
def test_it_is_named(taker, what, tmp_path, monkeypatch, capsys):
    if (taker, what) in FINE:
        return
    monkeypatch.chdir(tmp_path)
    words, name = TAKERS[taker]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(GARBAGE[what](path))
    assert cli.main([str(path) if word == "F" else word for word in words]) == cli.MISUSE
    error = capsys.readouterr().err
    assert name in error and "Traceback" not in error, error
    assert not list(tmp_path.glob("o.*"))


#: every other word that names a file or folder to read, H: one that is whole
READ = {
    "timeline of a profile": (["report", "H.json", "--timeline", "F"], "f.jsonl"),
    "trace to explain": (["explain", "--trace", "F", "--step", "0", "--layer", "0"], "f.trace.npz"),
    "trace to count": (["trace", "popularity", "F", "o.json", "--split", "a"], "f.trace.npz"),
    "trace held against": (["trace", "popularity", "sample:demo", "o.json", "--split", "a", "--against", "F"], "f.trace.npz"),
    "trace to export": (["trace", "export", "F", "o.parquet"], "f.trace.npz"),
    "model to record": (["trace", "record", "o.trace.npz", "--model", "F", "--prompts", "H.txt"], "f"),
    "prompts to record": (["trace", "record", "o.trace.npz", "--prompts", "F"], "f.txt"),
    "trace to simulate": (["simulate", "--trace", "F"], "f.trace.npz"),
    "trace to compare": (["compare", "--trace", "F", "--jobs", "1"], "f.trace.npz"),
    "traces to train on": (["train-predictor", "F"], "f.trace.npz"),
    "trace to judge on": (["train-predictor", "sample:demo", "--held-out", "F"], "f.trace.npz"),
    "predictor": (["simulate", "--policy", "mira(predictor=F)", "--jobs", "1"], "f.npz"),
    "workload": (["bench", "--workload", "F"], "f.txt"),
    "counts to plan by": (["plan", "olmoe-1b-7b-0924", "--popularity", "F"], "f.json"),
    "hardware to fit on": (["fit", "olmoe-1b-7b-0924", "--hardware", "F"], "f.json"),
    "counts": (["simulate", "--trace", "sample:demo", "--popularity", "F", "--jobs", "1"], "f.json"),
    **{f"model to {verb}": ([verb, *more, "F"], "f") for verb, more in {"run": ["x", "--model"], "chat": ["--model"], "serve": ["--model"], "bench": ["--model"],
                                                                        "plan": [], "fit": [], "profile": ["--tool", "torch", "--model"]}.items()},
    **{f"hardware to {verb}": ([verb, *more, "--hardware", "F"], "f.json") for verb, more in {
        "run": ["x"], "chat": [], "serve": [], "bench": [], "simulate": ["--jobs", "1"], "compare": ["--jobs", "1"], "evictions": [], "demo": [], "doctor": [],
        "profile": ["--tool", "torch"]}.items()},
}  # fmt: skip
#: what cannot be read, whoever asks: root may read what others may not, so permission is no case
ABSENT = {"is not there": lambda path: None, "is a folder": lambda path: path.mkdir(), "leads to itself": lambda path: path.symlink_to(path.name),
          "lies in a file": lambda path: path.parent.write_text("")}  # fmt: skip
SPEAKS = {"paper", "policies", "overhead", "payload"}  # verbs that read no file


def test_every_verb_that_reads_is_in_a_table():
    assert {words[0] for words, _ in (*TAKERS.values(), *READ.values())} == set(cli.VERBS) - SPEAKS


@pytest.mark.parametrize("how", ABSENT)
@pytest.mark.parametrize("taker", TAKERS | READ)
def test_what_cannot_be_read_is_misuse_in_one_line(taker, how, tmp_path, monkeypatch, capfd):
    words, name = (TAKERS | READ)[taker]
    if name.endswith("parquet") or taker == "trace to export":
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "H.txt").write_text("In the beginning\n")
    events = [{"ph": "X", "cat": "user_annotation", "name": f"apexk/{name}", "ts": 1, "dur": 1, "pid": 1, "tid": 1} for name in ("decode 0", "L00 0", "L00/combine 1")]
    (tmp_path / "H.json").write_text(json.dumps({"traceEvents": events}))
    path = tmp_path / "place" / name
    path.parent.mkdir() if how != "lies in a file" else None
    ABSENT[how](path)
    assert cli.main([word.replace("F", str(path)) if word in ("F", "mira(predictor=F)") else word for word in words]) == cli.MISUSE
    error = capfd.readouterr().err.strip()
    assert str(path) in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob("o.*"))


@pytest.mark.parametrize(("line", "said"), [
    ('{"layer": 0, "experts": [0.5, 1.5]}', "whole numbers"), ('{"layer": 0, "experts": []}', "whole numbers"), ('{"layer": 0, "experts": [[0], [1, 2]]}', "f.jsonl"),
    ('{"layer": null, "experts": [1]}\n{"layer": 0, "experts": [1]}', "f.jsonl"), ('{"layer": [], "experts": [1]}', "f.jsonl"), ('{"layer": 0, "experts": [8]}', "0..7"),
])  # fmt: skip
def test_lines_of_another_kind(tmp_path, line, said, capsys):
    (tmp_path / "f.jsonl").write_text(line + "\n")
    assert cli.main(["trace", "import", str(tmp_path / "f.jsonl"), "--model", "m", "--experts", "8", "--out", str(tmp_path / "o.trace.npz")]) == cli.MISUSE
    assert said in capsys.readouterr().err


def test_more_experts_than_an_id_can_name(tmp_path, capsys):
    (tmp_path / "f.jsonl").write_text('{"layer": 0, "experts": [40000]}\n')
    assert cli.main(["trace", "import", str(tmp_path / "f.jsonl"), "--model", "m", "--experts", "50000", "--out", str(tmp_path / "o.trace.npz")]) == cli.MISUSE
    assert "32768" in capsys.readouterr().err


def test_what_names_the_file_already_passes(tmp_path):
    with pytest.raises(FileNotFoundError), reading(tmp_path / "x", "anything"):
        (tmp_path / "x").read_text()
    own = ValueError("x, line 3: no JSON")
    with pytest.raises(ValueError) as raised, reading("x", "anything"):
        raise own
    assert raised.value is own
