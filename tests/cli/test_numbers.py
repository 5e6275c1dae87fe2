"""Every number and list on the command line: what none can be is refused with its flag's name."""

import argparse

import pytest

from apexk import cli
from apexk.cli.flags import positive
from apexk.cli.flags import words as names

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
            if action.option_strings and getattr(action.type, "__module__", "") in ("apexk.cli.flags", "builtins") and action.type is not None:
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


BAD_SETTINGS = [
    (["--change", "cpu.c0=nan"], "cpu.c0"), (["--change", "cpu.c0=-1"], "cpu.c0"), (["--change", "cpu.c0=inf"], "cpu.c0"), (["--change", "gpu.g1=1e400"], "gpu.g1"),
    (["--change", "cpu.zz=1"], "cpu.zz"), (["--change", "name.x=1"], "name.x"), (["--change", "layer.kappa=0"], "layer.kappa"), (["--change", "cpu.c0=x"], "cpu.c0"),
    (["--change", "cpu.c0"], "KEY=VALUE"), (["--set", "x=1"], "'x'"), (["--set", "payload=int8"], "'payload'"), (["--set", "pool=8"], "'pool'"), (["--set", "rate_ema=nan"], "rate_ema"), (["--set", "cost=zz"], "cost"), (["--set", "in_flight=zz"], "in_flight"),
    (["--policy", ""], "--policy"), (["--policy", "apex,,ea_only"], "--policy"), (["--policy", "apex("], "apex("), (["--policy", "fixed_p(p=-1)"], "fixed_p"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD_SETTINGS, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_constants_and_settings_that_cannot_be(words, said, capsys):
    assert cli.main(["simulate", "--steps", "11", "--no-references", "--jobs", "1", "--policy", "apex", *words]) == cli.MISUSE
    error = capsys.readouterr().err
    assert said in error and "__init__" not in error


def test_a_report_skips_no_negative_number_of_steps(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path / "x.jsonl"), "--skip=-1"]) == cli.MISUSE
    assert "--skip" in capsys.readouterr().err
