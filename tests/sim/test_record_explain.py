"""A recorded trace replays as the run it came from; an explanation says what a timeline holds and what was best."""

import json

import pytest

import apexk
from apexk import hardware
from apexk.cli import main
from apexk.demo import model as demo
from apexk.policy import names
from apexk.sim import trace
from apexk.sim.demand import demand_of
from apexk.sim.record import Recorder
from apexk.sim.run import simulate

SPLITS = "apexk.testing.splits:SplitAll"
QUICK = ("apex", "hybrimoe", "post_fetch", "mixtral_offloading", "fiddler_original(threshold=1)", SPLITS)
REST = [*(n for n in names() if n not in QUICK), "apex(cost=rates)", "fixed_p(p=3, keep=false)"]


@pytest.mark.parametrize("policy", [*QUICK, *(pytest.param(spec, marks=pytest.mark.nightly) for spec in REST)])
def test_simulating_a_recorded_run_is_the_run(trained, tmp_path, policy):
    """Virtual run with tensors against the simulation of its routing: hits, copies, bytes and time, phase by phase."""
    model, tokenizer = trained()
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=8)) as handle:
        shape = handle.engine.shape
        recorder = Recorder(4, shape.experts, "demo")
        handle.engine.recorder = recorder
        demo.generate(model, tokenizer, demo.prompts(4, seed=2), 6)
        ran, size = handle.engine.totals, handle.engine.bytes_per_expert
    made = trace.read(trace.write(recorder.trace(), tmp_path / "a.trace.npz"))
    assert (made.layers, made.experts) == (shape.layers, shape.experts)
    totals = simulate(demand_of(made), hardware.load("a6000-paper"), policy, 8, warmup=0).totals
    for phase in ("prefill", "decode"):
        a, b = ran[phase], totals[phase]
        assert b.steps > 0
        for name in ("steps", "layers", "tokens", "active", "hits", "exact", "speculative", "used", "abandoned", "cpu_experts", "cpu_pairs"):
            assert getattr(a, name) == getattr(b, name), (phase, name)
        assert a.bytes // size == b.bytes // 6291456
        assert a.step_ms == pytest.approx(b.step_ms)


def test_record_verb(tmp_path, capsys):
    path = tmp_path / "a.trace.npz"
    assert main(["trace", "record", str(path), "--batch", "2", "--tokens", "4"]) == 0
    made = trace.read(path)
    assert made.step.max() == 3 and (made.phase == 0).sum() > (made.phase == 1).sum() == 2 * 3
    with pytest.raises(ValueError, match="nothing was recorded"):
        Recorder(1, 4, "m").trace()


def test_explain(tmp_path, capsys):
    out = tmp_path / "e.json"
    assert main(["explain", "--step", "5", "--layer", "3", "--batch", "8", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    loads = [n for _, n in found["missed"]]
    assert loads == sorted(loads, reverse=True)
    assert found["choice"]["copied"] == [e for e, _ in found["missed"]][: found["choice"]["p"]]
    chosen = found["true_paths"][found["choice"]["p"]]
    assert [found["measured"]["cpu_ms"], found["measured"]["gpu_ms"]] == pytest.approx(chosen, abs=1e-5)
    assert max(found["true_paths"][found["oracle"]["p"]]) == min(max(pair) for pair in found["true_paths"])
    assert "oracle" in capsys.readouterr().out
    assert main(["explain", "--step", "5", "--layer", "99"]) == 2
    assert "steps 0..5 and layers 0..39" in capsys.readouterr().err


def explained(capsys, tmp_path, policy, pool, step, layer, batch=3):
    """(what is found, what is shown) of a decision in a generated trace."""
    out = tmp_path / "e.json"
    words = ["explain", "--step", step, "--layer", layer, "--batch", batch, "--seed", 3, "--policy", policy, "--pool", pool, "--json", out]
    assert main([str(word) for word in words]) == 0
    return json.loads(out.read_text()), capsys.readouterr().out


def test_a_split_is_shown(capsys, tmp_path):
    """Every expert with a slot and more than one pair; the times are those of the pairs on each side."""
    found, shown = explained(capsys, tmp_path, SPLITS, 64, 5, 3, batch=16)
    machine, choice, loads = hardware.load("a6000-paper"), found["choice"], dict(found["resident"] + found["missed"])
    on_gpu, split = choice["gpu"] + choice["copied"], dict(choice["split"])
    assert split and set(split) == {e for e in on_gpu if loads[e] > 1}
    left = sum(loads[e] for e in choice["cpu"]) + sum(loads[e] - n for e, n in split.items())
    assert found["measured"]["cpu_ms"] == pytest.approx(machine.cpu_ms(len(choice["cpu"]) + len(split), left), abs=1e-5)
    for expert, pairs in split.items():
        assert f"expert {expert} is split: the GPU has {pairs} of its pairs" in shown


def test_a_choice_in_waves_is_shown_and_not_set_against_counts_that_fit(capsys, tmp_path):
    found, shown = explained(capsys, tmp_path, "mira", 2, 1, 3)
    chosen = found["choice"]["p"]
    assert chosen > found["available"] and found["oracle"]["choice_in_waves"]
    assert [line for line in shown.splitlines() if line.startswith(f"{chosen:3d} ") and line.endswith("chosen")]
    assert "the choice ran in waves" in shown


def test_experts_that_come_a_layer_late_are_in_no_time_of_their_layer(capsys, tmp_path):
    """The modelled CPU path is that of the layer's own share, by the hardware file's line."""
    found, shown = explained(capsys, tmp_path, "kt_static(defer=2)", 2, 1, 0)  # no layer before it has the CPU busy
    late, machine = found["late"], hardware.load("a6000-paper")
    own = [n for e, n in found["missed"] if e not in late]
    assert late and set(late) < {e for e, _ in found["missed"]} and found["choice"]["p"] == 0
    assert found["measured"]["cpu_ms"] == pytest.approx(machine.cpu_ms(len(own), sum(own)), abs=1e-5)
    assert found["true_paths"][0][0] == pytest.approx(found["measured"]["cpu_ms"], abs=1e-5)
    assert "a layer late, in none of these times" in shown
