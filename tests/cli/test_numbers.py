"""Every number and list on the command line: what none can be is refused with its flag's name."""

import argparse
import re

import pytest

from apexk import cli
from apexk.arguments import positive
from apexk.arguments import words as names

NEEDED = {"explain": ["--step", "0", "--layer", "0"], "fit": ["x"], "plan": ["x"], "paper": ["table3"], "run": ["x"], "report": ["x"], "kernels": ["bench"], "trace": ["generate", "x.trace.npz"],
          "train-predictor": ["x.trace.npz"]}
NEEDED_BY_ACTION = {"generate": ["x.trace.npz"], "record": ["x.trace.npz"], "import": ["x.npz", "--model", "a", "--out", "x.trace.npz", "--experts", "8"]}


def numeric(verb: str):
    """(words before it, flag, type) of every flag of a verb with a type of its own."""
    parser = argparse.ArgumentParser()
    cli.module(verb).add_arguments(parser)
    parsers = [([verb, *NEEDED.get(verb, [])], parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers = [([verb, name, *NEEDED_BY_ACTION.get(name, [])], sub) for name, sub in action.choices.items()]
    for words, found in parsers:
        for action in found._actions:
            if action.option_strings and getattr(action.type, "__module__", "") in ("apexk.arguments", "builtins") and action.type is not None:
                yield words, action.option_strings[0], action.type


ALL = [(words, flag, kind) for verb in cli.VERBS for words, flag, kind in numeric(verb)]
FLAGS = [row for row in ALL if row[2] is not int]


def test_no_number_goes_unchecked():
    assert [(words[0], flag) for words, flag, kind in ALL if kind in (int, float) and words[0] != "report"] == []
    assert {"simulate", "bench", "run", "demo", "explain", "fit", "trace", "overhead"} <= {words[0] for words, _, _ in FLAGS}


@pytest.mark.parametrize(("words", "flag", "kind"), FLAGS, ids=lambda v: v if isinstance(v, str) else " ".join(v[:2]) if isinstance(v, list) else "")
def test_what_is_no_number_is_refused_by_flag(words, flag, kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = cli.module(words[0])
    monkeypatch.setattr(module, "run", lambda args: pytest.fail(f"it ran with {args}"))
    for bad in ["", "1,,2", ","] + ([] if kind in (names, positive) else ["99999999999999999999"]) + ([] if kind is names else ["-1", "nan", "inf", "x", "1.5.1"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, f"{flag}={bad}"])
        error = capsys.readouterr().err
        assert ended.value.code == cli.MISUSE and f"argument {flag}: " in error and "wanted" in error, (bad, error)
    assert not list(tmp_path.iterdir())


def lists():
    """(words, said): every flag that takes a list, or may come again, given an entry twice."""
    for words, flag, kind in FLAGS:
        for entry in ("3", "a6000-paper"):
            try:
                several = isinstance(kind(entry), list)
            except argparse.ArgumentTypeError:
                continue
            if several:
                yield [*words, flag, f"{entry}, {entry}"], flag
                break
    yield ["simulate", "--trace", "sample:demo", "--trace", "sample:demo"], "--trace"
    yield ["simulate", "--set", "cost=rates", "--set", "cost=rates"], "--set"
    yield ["compare", "--trace", "sample:demo", "--trace", "sample:demo"], "--trace"
    yield ["report", "x", "y", "x"], "file"
    yield ["train-predictor", "x", "x"], "trace"
    yield ["trace", "import", "x", "x", "--model", "a", "--experts", "8", "--out", "o"], "files"
    yield ["kernels", "bench", "--tokens", "1,01"], "--tokens"
    yield ["kernels", "bench", "--against", "torch,torch"], "--against"
    yield ["kernels", "aot", "--targets", "80,80"], "--targets"
    yield ["kernels", "cuda", "--aot", "--targets", "80,80"], "--targets"


@pytest.mark.parametrize(("words", "said"), [*lists()], ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_an_entry_that_comes_twice_is_refused_by_flag(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if words[0] != "kernels":
        monkeypatch.setattr(cli.module(words[0]), "run", lambda args: pytest.fail(f"it ran with {args}"))
    assert cli.main(words) == cli.MISUSE
    assert re.search(rf"{said} has .* twice; wanted each once", capsys.readouterr().err)


@pytest.mark.parametrize("words", [["compare", "--systems", "all,apex"], ["simulate", "--policy", "ea_only,all"]], ids=" ".join)
def test_all_names_each_once(words, capsys):
    assert cli.main(words) == cli.MISUSE
    assert f"{words[1]} has" in capsys.readouterr().err


def test_a_file_by_two_of_its_names_comes_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("")
    assert cli.main(["report", "a", "./a"]) == cli.MISUSE
    assert "twice" in capsys.readouterr().err


def test_commas_in_parentheses_are_the_names_own():
    assert names("apex(evict=lru, cost=rates), ea_only,a:B(x=1)") == ["apex(evict=lru, cost=rates)", "ea_only", "a:B(x=1)"]


BAD_SETTINGS = [
    (["--change", "cpu.c0=nan"], "cpu.c0"), (["--change", "cpu.c0=-1"], "cpu.c0"), (["--change", "cpu.c0=inf"], "cpu.c0"), (["--change", "gpu.g1=1e400"], "gpu.g1"),
    (["--change", "cpu.zz=1"], "cpu.zz"), (["--change", "name.x=1"], "name.x"), (["--change", "layer.kappa=0"], "layer.kappa"), (["--change", "cpu.c0=x"], "cpu.c0"),
    (["--change", "cpu.c0"], "KEY=VALUE"), (["--set", "x=1"], "'x'"), (["--set", "payload=int8"], "'payload'"), (["--set", "pool=8"], "'pool'"), (["--set", "rate_ema=nan"], "rate_ema"), (["--set", "cost=zz"], "cost"), (["--set", "in_flight=zz"], "in_flight"),
    (["--policy", "apex("], "apex("), (["--policy", "fixed_p(p=-1)"], "fixed_p"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD_SETTINGS, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_constants_and_settings_that_cannot_be(words, said, capsys):
    assert cli.main(["simulate", "--steps", "11", "--no-references", "--jobs", "1", "--policy", "apex", *words]) == cli.MISUSE
    error = capsys.readouterr().err
    assert said in error and "__init__" not in error


def test_a_report_skips_no_negative_number_of_steps(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path / "x.jsonl"), "--skip=-1"]) == cli.MISUSE
    assert "--skip" in capsys.readouterr().err
