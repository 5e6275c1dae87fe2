"""`apexk plan`: what it shows and writes, what a popularity file changes, and what it refuses."""

import json

import pytest

from apexk.cli import main
from apexk.cli.plan import shares_of
from apexk.demo.model import DATA
from apexk.sim.popularity import Popularity, write

WORDS = ["plan", str(DATA), "--most", "8", "--prompt", "16", "--new", "16"]


def test_three_plans(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main([*WORDS, "--json", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert all(name in shown for name in ("flexgen", "moe_lightning", "cox_moe")) and "neither measured nor a forecast" in shown
    assert [c["system"] for c in found["choices"]] == ["flexgen", "moe_lightning", "cox_moe"] and found["refused"] == []
    assert (found["model"]["layers"], found["model"]["experts"], found["model"]["topk"]) == (4, 32, 4)


def test_a_model_that_cannot_fit_ends_with_the_numbers(capsys):
    assert main([*WORDS, "--gpu-memory", "1KiB", "--systems", "cox_moe"]) == 3
    assert "needs" in (said := capsys.readouterr().out) and "of GPU memory, of 0.00 GiB" in said


def test_shares_are_sorted_means_over_layers(tmp_path):
    path = tmp_path / "p.json"
    write(Popularity("m", "s", [[1, 3, 0, 0], [0, 0, 2, 2]], frozenset()), path)
    assert shares_of(str(path), 2, 4) == pytest.approx([(0.75 + 0.5) / 2, (0.25 + 0.5) / 2, 0, 0])


@pytest.mark.parametrize(("words", "said"), [(["--systems", "vllm"], "no planner or machine 'vllm'"), (["--machine", "h900"], "'h900'"),
                                             *((["--host-memory", size], "--host-memory: '") for size in ("12", "12zz", "0GiB", ""))])  # fmt: skip
def test_bad_input_is_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*WORDS, *words]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
