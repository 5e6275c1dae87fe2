"""The simulator against a model of a run written from the design's description, and its tables."""

import importlib.util
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from apexk import hardware
from apexk.cli import main
from apexk.policy import names
from apexk.sim import trace
from apexk.sim.cells import Cell, TraceSpec, interval, run_table
from apexk.sim.demand import demand_of
from apexk.sim.generate import Shape, generate
from apexk.sim.named import REFERENCES
from apexk.sim.offset import refit
from apexk.sim.run import prior_of, simulate

spec = importlib.util.spec_from_file_location("oracle", Path(__file__).parents[1] / "engine" / "oracle.py")
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

PAPER = hardware.load("a6000-paper")
SMALL = Shape("small", layers=4, experts=32, topk=4)


@pytest.fixture(scope="module")
def demand():
    return demand_of(generate(shape=SMALL, batch=8, steps=12, seed=1))


@pytest.mark.parametrize("pool", [0, 4, 16, 32])
@pytest.mark.parametrize(("name", "exact", "speculative"), [("no_assign", 0, 0), ("sa_only", 0, 1), ("ea_only", 1, 0), ("apex", 1, 1)])
def test_simulation_is_the_described_run(demand, name, exact, speculative, pool):
    run = simulate(demand, PAPER, name, pool, warmup=0, config={"evict": "utility"})
    wanted = oracle.Oracle(PAPER, 4, pool, bool(exact), bool(speculative), decay=0.5)
    wanted.start(run.engine.policy.initial, demand.popularity, 4)
    guess = [[None if p is None else {e: (n, p[1][e]) for e, n in p[0].items()} for p in s.predicted] for s in demand.steps]
    total = sum(wanted.step(s.loads, g) for s, g in zip(demand.steps, guess, strict=True))
    sums = run.totals["decode"]
    assert {key: getattr(sums, key) for key in wanted.figures} == wanted.figures
    assert sums.step_ms == pytest.approx(total, rel=1e-6)


def test_warmup_is_run_and_not_counted(demand):
    whole, rest, head = (simulate(d, PAPER, "apex", 8, warmup=w).totals["decode"]
                         for d, w in ((demand, 0), (demand, 5), (replace(demand, steps=demand.steps[:5]), 0)))
    assert rest.steps == 7
    assert rest.step_ms + head.step_ms == pytest.approx(whole.step_ms)
    assert rest.exact + head.exact == whole.exact
    with pytest.raises(ValueError, match="leaves none"):
        simulate(demand, PAPER, "apex", 8, warmup=12)
    with pytest.raises(ValueError, match="wanted 0..32"):
        simulate(demand, PAPER, "apex", 33)


def test_refit_meets_the_target(demand):
    machine = refit(demand, PAPER, target=300.0, pool=8, warmup=2)
    assert simulate(demand, machine, "no_assign", 8, warmup=2).report()["decode"]["tokens_per_s"] == pytest.approx(300.0)
    old = PAPER.layer
    assert machine.layer.o_att / machine.layer.o_post == pytest.approx(old.o_att / old.o_post)
    with pytest.raises(ValueError, match="the paths alone take"):
        refit(demand, PAPER, target=1e6, pool=8, warmup=2)


@pytest.mark.parametrize("name", ["a6000-paper", "pinned-link"])
@pytest.mark.parametrize("wrong", [{"c0": 0.2, "b": 0.1}, {"s0": 0.01, "t1": 0.1}, {"t1": 1.5}, {"c0": 6.0}, {"g0": 0.05, "g2": 0.01}], ids=str)
def test_a_wrong_start_is_learnt_away(name, wrong):
    """Cost models that start several times off come within 3 % of the run that starts from the truth, after 10 steps."""
    demand = demand_of(generate(shape=Shape(layers=8), steps=24, seed=4))
    machine = hardware.load(name)
    right = simulate(demand, machine, "apex", 64).report()["decode"]
    learnt = simulate(demand, machine, "apex", 64, prior=replace(prior_of(machine), **wrong)).report()["decode"]
    assert learnt["tokens_per_s"] >= 0.97 * right["tokens_per_s"]
    assert learnt["mean_estimate_error"] < 0.05


def test_a_trace_that_predicts_less_far_than_the_policy_looks_is_named(demand, caplog):
    with caplog.at_level("WARNING", "apexk.sim"):
        simulate(demand, PAPER, "apex", 8, warmup=0)
        assert not caplog.records
        simulate(demand, PAPER, "hybrimoe", 8, warmup=0)
    assert "hybrimoe looks 3 layers ahead" in caplog.text and "reach 1" in caplog.text


def test_looking_farther_ahead_brings_more_hits():
    """On a link that has time to spare, and the same trace."""
    far = demand_of(generate(shape=Shape("small", layers=8, experts=64, topk=4), batch=2, steps=16, seed=1, look_ahead=3))
    hits = [simulate(far, hardware.load("pinned-link"), f"hybrimoe(look_ahead={n})", 16, warmup=4).report()["decode"]["hit_rate"] for n in (1, 3)]
    assert hits[1] > hits[0]


def test_interval():
    """Student's t with 2 degrees of freedom, by hand: 4.303 * 1 / sqrt(3)."""
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert interval([5.0]) == (5.0, None)


def test_table_over_seeds_and_processes_is_the_single_runs():
    cells = [Cell(TraceSpec(steps=12, batch=2), "a6000-paper", name, 16, warmup=4) for name in ("no_assign", "apex", "clairvoyant")]
    rows = run_table(cells, (0, 1), jobs=2)
    by_hand = [simulate(demand_of(generate(batch=2, steps=12, seed=s)), PAPER, "apex", 16, warmup=4).report()["decode"]["tokens_per_s"] for s in (0, 1)]
    assert rows[1].mean["tokens_per_s"] == pytest.approx(sum(by_hand) / 2)
    assert rows[2].percent_of_clairvoyant == 100 and rows[1].percent_of_clairvoyant <= 100.5
    assert rows[1].seeds == 2 and rows[1].half["tokens_per_s"] > 0


def test_simulate_verb(tmp_path, capsys):
    path = trace.write(generate(shape=SMALL, batch=4, steps=8), tmp_path / "a.trace.npz")
    out = tmp_path / "r.json"
    code = main(["simulate", "--trace", str(path), "--policy", "apex,no_assign", "--pool", "8,16", "--warmup", "2", "--jobs", "1",
                 "--change", "cpu.c0=0.3", "--json", str(out)])
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * (2 + len(REFERENCES)) and all(r["modelled"] for r in rows)
    assert "% clairvoyant" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "best"], "unknown policy 'best'"),
        (["--hardware", "h900"], "no hardware file 'h900'"),
        (["--preset", "noise"], "unknown preset 'noise'"),
        (["--model", "gpt9"], "unknown model 'gpt9'"),
        (["--pool", "999"], "wanted 0..256"),
        (["--change", "cpu.zz=1"], "no constant 'cpu.zz'"),
        (["--set", "evict=dice"], "'dice'"),
        (["--trace", "/nowhere.trace.npz"], "no trace file"),
    ],
)
def test_bad_input_is_named(arguments, said, capsys):
    assert main(["simulate", "--steps", "4", "--batch", "1", "--warmup", "1", "--jobs", "1", "--no-references", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_page_and_the_command_that_repeats_it(tmp_path, capsys):
    """Each figure of the page is the JSON file's, and the command it shows gives the same page again."""
    path = trace.write(generate(shape=SMALL, batch=4, steps=8), tmp_path / "a b.trace.npz")
    out, again, figures = tmp_path / "p.md", tmp_path / "q.md", tmp_path / "r.json"
    flags = ["--trace", str(path), "--policy", "apex,fixed_p(p=2)", "--pool", "8,16", "--warmup", "2", "--hardware", "a6000-paper,pinned-link-c0.3", "--set",
             "resident_first=true"]
    assert main(["simulate", *flags, "--jobs", "1", "--page", str(out), "--json", str(figures)]) == 0
    text = out.read_text()
    (shown,) = [line for line in text.splitlines() if line.startswith("apexk simulate")]
    assert main([*shlex.split(shown)[1:], "--jobs", "1", "--page", str(again)]) == 0
    assert again.read_text() == text
    assert "| pinned-link-c0.3: tokens/s |" in text and "pinned-link-c0.3" in capsys.readouterr().out
    sections = text.split("## ")[1:]
    assert [s.splitlines()[0] for s in sections] == ["a b.trace.npz, 8 slots a layer", "a b.trace.npz, 16 slots a layer"]
    for row in json.loads(figures.read_text())["rows"]:
        (line,) = [line for line in sections[row["pool"] == 16].splitlines() if line.startswith(f"| `{row['policy']}` |")]
        first = 1 if row["hardware"] == "a6000-paper" else 4
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[first] == f"{row['mean']['tokens_per_s']:.1f}" and cells[first + 1] == f"{row['percent_of_clairvoyant']:.1f}"


def test_all_is_every_policy(tmp_path, capsys):
    out = tmp_path / "r.json"
    assert main(["simulate", "--preset", "mmlu-like", "--batch", "1", "--steps", "2", "--warmup", "1", "--jobs", "1", "--no-references", "--policy",
                 "all,fixed_p(p=1)", "--json", str(out)]) == 0
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == [*names(), "fixed_p(p=1)"]
