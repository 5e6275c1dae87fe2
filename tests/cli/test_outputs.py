"""What a verb writes: a path that cannot be written is refused before its work, and a file is there whole or not at all."""

import argparse
import json
import os
import stat
import sys

import pytest

from apexk import cli
from apexk.outputs import out_file, out_folder, write_json, writing
from apexk.profiling.gpu_suite import __main__ as gpu_suite

#: every flag that names a file or folder to write: the words that the verb needs besides, the flag (or None: the place comes last), what it wants
WRITTEN = [
    (["demo"], "--out", "folder"), (["demo"], "--json", "file"), (["run", "x"], "--json", "file"), (["run", "x"], "--trace", "file"),
    (["run", "x"], "--timeline", "file"), (["chat"], "--timeline", "file"), (["serve"], "--timeline", "file"), (["bench"], "--json", "file"),
    (["bench"], "--csv", "file"), (["policies"], "--json", "file"), (["simulate"], "--json", "file"), (["evictions"], "--json", "file"),
    (["paper", "table3"], "--json", "file"), (["paper", "table3"], "--draw", "folder"), (["explain", "--step", "0", "--layer", "0"], "--json", "file"),
    (["trace", "generate"], None, "file"), (["trace", "stats", "sample:demo"], "--json", "file"), (["trace", "stats", "sample:demo"], "--plot", "file"),
    (["trace", "popularity", "x", "--split", "a"], None, "file"), (["trace", "import", "x.npz", "--model", "a", "--experts", "8"], "--out", "file"),
    (["trace", "record"], None, "file"), (["trace", "export", "x"], None, "file"),
    (["kernels", "bench"], "--json", "file"), (["kernels", "bench"], "--jsonl", "file"), (["kernels", "cpu", "--busy"], "--json", "file"),
    (["kernels", "aot"], "--json", "file"), (["kernels", "cuda", "--aot"], "--json", "file"),
    (["report", "x"], "--csv", "file"), (["report", "x"], "--json", "file"), (["report", "x"], "--plot", "file"), (["report", "x"], "--plots", "folder"),
    (["report", "x"], "--html", "file"), (["report", "x"], "--trace", "file"), (["overhead"], "--json", "file"), (["fit", "x"], "--json", "file"),
    (["doctor"], "--json", "file"), (["profile"], "--out", "folder"), (["plan", "x"], "--json", "file"), (["payload"], "--json", "file"),
    (["train-predictor", "x"], "--out", "file"), (["train-predictor", "x"], "--json", "file"), (["simulate"], "--page", "file"), (["compare"], "--json", "file"), (["compare"], "--csv", "file"), (["compare"], "--picture", "file"), (["compare"], "--page", "file"),
]  # fmt: skip


def words_of(row) -> str:
    return " ".join([*row[0][:2], row[1] or ""]).strip()


def test_the_table_names_every_verb():
    assert {words[0] for words, _, _ in WRITTEN} == set(cli.VERBS)


def test_the_table_names_every_flag():
    """From the parsers: a flag whose place-holder says that it is written has a type that looks at the place."""
    there = {(words[0], flag) for words, flag, _ in WRITTEN}
    for verb in cli.VERBS:
        parser = argparse.ArgumentParser()
        cli.module(verb).add_arguments(parser)
        for action in parser._actions:
            if action.metavar in ("OUT", "DIR", "PNG") or action.option_strings == ["--out"]:
                assert any((verb, flag) in there for flag in action.option_strings), f"apexk {verb} {action.option_strings} is missing above"


#: a folder that is not there yet is made, and one that is there is written into
PLACES = {"file": ["nowhere/x", "a_file/x", "a_folder", "locked/x"], "folder": ["a_file/x", "locked/x"]}


@pytest.mark.parametrize(("row", "where"), [(row, where) for row in WRITTEN for where in PLACES[row[2]]], ids=lambda v: v if isinstance(v, str) else words_of(v))
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(row, where, monkeypatch, capsys, tmp_path):
    words, flag, _ = row
    (tmp_path / "a_file").write_text("as it was")
    (tmp_path / "a_folder").mkdir()
    if where == "locked/x":
        monkeypatch.setattr("tempfile.mkstemp", denied)  # root may write anywhere: the system's answer is played
        (tmp_path / "locked").mkdir()
    if words[0] != "kernels":
        module = cli.module(words[0])
        monkeypatch.setattr(module, "run", lambda args: pytest.fail("it ran"))
    place = tmp_path / where
    assert cli.main([*words, *([flag] if flag else []), str(place)]) == cli.MISUSE
    error = capsys.readouterr().err
    assert str(place) in error and "Traceback" not in error
    assert (tmp_path / "a_file").read_text() == "as it was" and not (tmp_path / "nowhere").exists() and not list((tmp_path / "a_folder").iterdir())


PAIRS = [(words, one, other) for i, (words, one, kind) in enumerate(WRITTEN) for more, other, second in WRITTEN[:i] if more == words and kind == second == "file"]
#: outputs that meet an input, or a file of a folder: the words, F the input's place, O that of the output
MEETING = {
    "report": ["report", "F", "--json", "O"], "trace of a report": ["report", "x", "--timeline", "F", "--trace", "O"], "explain": ["explain", "--step", "0", "--layer", "0", "--trace", "F", "--json", "O"],
    "stats": ["trace", "stats", "F", "--json", "O"], "export": ["trace", "export", "F", "O"], "import": ["trace", "import", "x.npz", "F", "--model", "a", "--experts", "8", "--out", "O"],
    "prompts": ["run", "--file", "F", "--json", "O"], "workload": ["bench", "--workload", "F", "--csv", "O"], "hardware": ["simulate", "--hardware", "a6000-paper,F", "--json", "O"],
    "predictor": ["simulate", "--policy", "apex,mira(cost=rates, predictor=F)", "--page", "O"], "training": ["train-predictor", "x", "F", "--out", "O"], "held out": ["train-predictor", "x", "--held-out", "F", "--out", "O"],
    "counts": ["plan", "x", "--popularity", "F", "--json", "O"], "template": ["serve", "--chat-template", "F", "--timeline", "O"], "rows": ["kernels", "bench", "--baseline", "F", "--json", "O"],
    "rows to draw": ["kernels", "plot", "F", "O"], "compared": ["compare", "--trace", "F", "--picture", "O"],
}  # fmt: skip
OF_A_FOLDER = [
    (["demo", "--out", "D", "--json"], "summary.json"), (["demo", "--out", "D", "--json"], "timeline.jsonl"), (["paper", "fig2", "--draw", "D", "--json"], "fig2-a.timeline.jsonl"),
    (["report", "x", "--plots", "D", "--html"], "layer_timeline.png"), (["run", "x", "--model", "D", "--json"], "config.json"), (["chat", "--model", "D", "--timeline"], "model.safetensors"),
    (["trace", "record", "--model", "D", "--prompts", "x"], "tokenizer.json"),
]  # fmt: skip


def refused(words, said, monkeypatch, capsys):
    if words[0] != "kernels":
        monkeypatch.setattr(cli.module(words[0]), "run", lambda args: pytest.fail("it ran"))
    assert cli.main(words) == cli.MISUSE
    error = capsys.readouterr().err
    assert all(one in error for one in ("over", *said)) and len(error.splitlines()) == 1, error


@pytest.mark.parametrize(("words", "one", "other"), PAIRS, ids=str)
def test_two_outputs_in_one_place_are_refused_before_anything_runs(words, one, other, monkeypatch, capsys, tmp_path):
    """By whatever name."""
    (tmp_path / "link").symlink_to(tmp_path / "x.png")
    refused([*words, one, str(tmp_path / "x.png"), other, f"{tmp_path}/./link"], (one, other), monkeypatch, capsys)


@pytest.mark.parametrize("name", MEETING)
def test_an_output_that_is_an_input_is_refused_before_anything_runs(name, monkeypatch, capsys, tmp_path):
    place = tmp_path / "a.npz"
    if MEETING[name][-2:] == ["F", "O"] or "--picture" in MEETING[name]:
        place = place.with_suffix(".png")  # of a picture's name
    place.write_text("as it was")
    os.link(place, tmp_path / "kept")
    refused([word.replace("F", str(place)) if "F" in word else str(place) if word == "O" else word for word in MEETING[name]], (), monkeypatch, capsys)
    assert place.read_text() == "as it was" and os.path.samefile(place, tmp_path / "kept")


@pytest.mark.parametrize(("words", "name"), OF_A_FOLDER, ids=str)
def test_a_file_of_a_folder_that_is_written_or_read_is_refused_before_anything_runs(words, name, monkeypatch, capsys, tmp_path):
    refused([*(str(tmp_path) if word == "D" else word for word in words), str(tmp_path / name)], (name,), monkeypatch, capsys)


def test_what_is_apart_is_left_alone(monkeypatch, tmp_path):
    """Another file in the same folder, two outputs to nowhere, and rows that are added to those that are compared with."""
    from apexk.kernels.bench import run

    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    for words in (["compare", "--json", str(tmp_path / "a"), "--csv", str(tmp_path / "b")], ["compare", "--json", "/dev/null", "--csv", "/dev/null"],
                  ["demo", "--out", str(tmp_path), "--json", str(tmp_path / "out.json")], ["run", "x", "x", "--model", str(tmp_path), "--json", str(tmp_path / "x.json")]):  # fmt: skip
        monkeypatch.setattr(cli.module(words[0]), "run", lambda args: 7)
        assert cli.main(words) == 7
    assert run._parser().parse_args(["--baseline", str(rows), "--jsonl", str(rows)]).jsonl == rows


def test_the_gpu_suites_page_is_not_written_over_its_json(tmp_path):
    with pytest.raises(ValueError, match="page beside it"):
        gpu_suite.main(["--virtual", "--json", str(tmp_path / "x.md")])


@pytest.mark.parametrize(("words", "flag"), [(["compare"], "--picture"), (["trace", "stats", "sample:demo"], "--plot"), (["report", "x"], "--plot"), (["kernels", "plot", "x"], None)])
def test_a_picture_of_no_known_form_is_refused_before_anything_runs(words, flag, capsys, tmp_path):
    place = str(tmp_path / "picture.xyz")
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main([*words, *([flag] if flag else []), place]))
    assert ended.value.code == 2 and "pictures are eps, jpeg" in capsys.readouterr().err and not list(tmp_path.iterdir())


def denied(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_the_gpu_suite_looks_too(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        gpu_suite.main(["--virtual", "--json", str(tmp_path / "nowhere" / "x.json")])


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, ""])
def test_names_that_no_file_can_have(name):
    with pytest.raises(OSError):
        out_file(name)
    if name:
        with pytest.raises(OSError):
            out_folder(name)


def test_looking_leaves_nothing_and_touches_nothing(tmp_path):
    (tmp_path / "old.json").write_text("old")
    assert out_file(str(tmp_path / "old.json")).read_text() == "old"
    assert out_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert out_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["Ctrl-C", "full disk"])
def test_a_write_that_ends_early_leaves_the_older_file(tmp_path, ends):
    path = tmp_path / "x.json"
    write_json(path, {"n": 1})
    with pytest.raises((KeyboardInterrupt, OSError)), writing(path) as part:
        part.write_text('{"n": ')
        raise ends
    assert json.loads(path.read_text()) == {"n": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("failing", [lambda part: OSError(28, "No space left on device"), lambda part: PermissionError(13, "Permission denied", str(part))])
def test_what_goes_wrong_with_a_file_names_it(tmp_path, failing):
    """Whoever wrote it, and however; another file's trouble stays that file's."""
    path = tmp_path / "t.npz"
    with pytest.raises(OSError, match=r"t\.npz cannot be written: (No space|Permission)"), writing(path) as part:
        raise failing(part)
    with pytest.raises(FileNotFoundError, match="else.txt"), writing(path):
        (tmp_path / "else.txt").read_text()
    with pytest.raises(OSError, match="^said already$"), writing(path):
        raise OSError("said already")
    assert not list(tmp_path.iterdir())


def test_links_modes_and_pipes_stay_what_they_are(tmp_path):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_json(link, 3)
    assert link.is_symlink() and json.loads(real.read_text()) == 3 and stat.S_IMODE(real.stat().st_mode) == 0o640
    fresh = tmp_path / "fresh.json"
    write_json(fresh, 1)
    (tmp_path / "usual").write_text("")
    assert fresh.stat().st_mode == (tmp_path / "usual").stat().st_mode
    os.mkfifo(pipe)
    assert out_file(str(pipe)) == pipe
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, [1])
    assert json.loads(os.read(reader, 100)) == [1] and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_interrupts_and_closed_pipes_are_no_tracebacks(monkeypatch, capsys):
    from apexk.cli import policies

    def pressed(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(policies, "run", pressed)
    assert cli.main(["policies"]) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "apexk policies: interrupted\n"
    monkeypatch.setattr(policies, "add_arguments", lambda parser: pressed(parser))  # while a verb is imported
    assert cli.main(["policies"]) == 130


@pytest.mark.parametrize(("gone", "code", "said"), [("/dev/full", 1, b"No space left"), (None, 0, b"")], ids=["full", "closed pipe"])
def test_an_output_that_fails_under_a_verb(gone, code, said):
    import subprocess

    words = [sys.executable, "-m", "apexk.cli", "policies"]
    if gone:
        with open(gone, "wb") as out:
            done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
    assert done.returncode == code and said in done.stderr and b"Traceback" not in done.stderr and b"Exception" not in done.stderr


SHOWN = {
    "policies": ["policies"], "list of cases": ["kernels", "bench", "--list"], "modes": ["kernels", "cpu", "--help"], "doctor": ["doctor"], "stats": ["trace", "stats", "sample:demo", "--layers"],
    "explain": ["explain", "--step", "1", "--layer", "0"], "paper": ["paper", "table3"], "plan": ["plan", "olmoe-1b-7b-0924"],
    "simulate": ["simulate", "--steps", "3", "--warmup", "1", "--policy", "apex", "--no-references", "--jobs", "1", "--batch", "1"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_who_leaves_is_no_error_and_files_are_written_all_the_same(name, stream, monkeypatch, capfd, tmp_path):
    """Not even the first line is read. What is asked for in a file is there, whole."""
    reader, writer = os.pipe()
    os.close(reader)
    words, out = SHOWN[name], tmp_path / "x.json"
    written = ["--json", str(out)] if words[0] != "kernels" else []
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, stream, gone)
        if stream == "stderr":
            shown = cli.module(words[0]).run
            monkeypatch.setattr(cli.module(words[0]), "run", lambda args: (sys.stderr.write("seen by nobody\n"), shown(args))[1])
        assert cli.main([*words, *written]) == cli.DONE
    assert "Broken pipe" not in "".join(capfd.readouterr())
    assert not written or json.loads(out.read_text())


def test_a_run_that_nobody_reads_ends_at_the_next_token(monkeypatch, tmp_path):
    """Unless its answer is to be written into a file."""
    from apexk.bench import session

    made, real = [], session.Session.stream
    monkeypatch.setattr(session.Session, "stream", lambda *args, **how: (made.append(piece) or piece for piece in real(*args, **how)))
    pieces = []
    for more in ([], ["--json", str(tmp_path / "x.json")]):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as gone:
            monkeypatch.setattr(sys, "stdout", gone)
            made.clear()
            assert cli.main(["run", "In the beginning God created", "--tokens", "9", "--device", "cpu", *more]) == cli.DONE
            pieces.append(len(made))
    assert pieces[0] == 1 < pieces[1] and json.loads((tmp_path / "x.json").read_text())["answers"]


def test_a_standard_output_that_is_closed(tmp_path):
    import subprocess

    done = subprocess.run(f"exec {sys.executable} -m apexk.cli policies --json {tmp_path}/x.json >&-", shell=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == b"" and json.loads((tmp_path / "x.json").read_text())


def test_a_package_that_is_missing_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(["trace", "export", "sample:demo", str(tmp_path / "x.parquet")]) == cli.LACKING
    assert "pip install pyarrow" in capsys.readouterr().err
