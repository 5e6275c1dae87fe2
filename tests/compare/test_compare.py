"""The comparison: prompts made of decode steps, what the lanes did, and figures against a plain run."""

from dataclasses import replace

import numpy as np
import pytest

from apexk import hardware
from apexk.compare.measure import BESIDE, FIGURES, Place, compare, run_once
from apexk.compare.meter import Meter
from apexk.compare.page import write
from apexk.compare.report import as_text
from apexk.compare.systems import BY_NAME, SYSTEMS, System, chosen
from apexk.compare.workload import Workload, demand, prompted
from apexk.policy import get, names
from apexk.sim.generate import Shape, generate
from apexk.sim.run import simulate

SMALL = Shape("small", layers=3, experts=16, topk=2)


def test_a_prompt_is_its_decode_steps_in_one_pass():
    plain = generate(shape=SMALL, batch=3, steps=6, seed=2)
    made = prompted(plain, 4)
    assert (made.phase == 0).sum() == 12 and (made.step == 0).sum() == 12 and made.step.max() == 2
    first = made.step == 0
    for request in range(3):
        own = plain.routed_experts[(plain.request == request) & (plain.step < 4)]
        assert (made.routed_experts[first & (made.request == request)] == own).all(), "a request's prompt, in order of position"
    assert (made.routed_experts[~first] == plain.routed_experts[12:]).all()
    assert (made.profile_counts == plain.profile_counts).all()
    for length in (0, 6):
        with pytest.raises(ValueError, match="leaves no decode step"):
            prompted(plain, length)
    with pytest.raises(ValueError, match="prefill of its own"):
        prompted(made, 1)


def test_meter_by_hand():
    """Routed at 10, merged at 100: the GPU works in [10, 20) and [60, 80), copies run in [15, 50): 30 of 70 idle ns wait for copies."""
    meter = Meter()

    def row(kind, lane, start, end, layer=0):
        meter.add(step=0, layer=layer, phase="decode", kind=kind, lane=lane, start_ns=start, end_ns=end, modelled=True)

    row("attention", "gpu", 0, 10)
    row("route", "gpu", 10, 10)
    row("host.ffn", "cpu", 10, 100)
    row("copy.exact", "h2d", 15, 35)
    row("copy.exact", "h2d", 35, 50)
    row("copy.spec", "h2d", 50, 58, layer=1)
    row("gpu.resident", "gpu", 10, 20)
    row("gpu.arrived", "gpu", 60, 80)
    row("combine", "gpu", 100, 104)
    row("attention", "gpu", 104, 110, layer=1)
    meter.close_layer()
    lanes = meter.phases["decode"]
    assert (lanes.gpu, lanes.link, lanes.cpu) == (10 + 10 + 20 + 4 + 6, 43, 90)
    assert (lanes.for_weights, lanes.for_cpu) == (30, 30)


@pytest.mark.parametrize("name", ["apex", "hybrimoe", "mixtral_offloading", "kt_dynamic"])
@pytest.mark.parametrize("machine", ["a6000-paper", "pinned-link-c0.3"])
def test_figures_are_a_plain_runs(name, machine):
    """Throughputs as the simulator's own; what the GPU does and what it waits for add up to the time."""
    work = Workload(batch=2, prompt=4, steps=5)
    values = run_once(BY_NAME[name], Place(work, machine, 16))
    assert values.keys() == FIGURES.keys()
    seen = demand(replace(work, look_ahead=get(name).look_ahead))
    run = simulate(seen, hardware.load(machine), name, 16, warmup=0)
    assert values["decode_tokens_per_s"] == pytest.approx(run.report()["decode"]["tokens_per_s"])
    assert values["ttft_ms"] == pytest.approx(run.totals["prefill"].step_ms)
    assert values["gpu_idle"] == pytest.approx(values["for_weights"] + values["for_cpu"], abs=1e-9)
    assert values["stall_ms"] == pytest.approx(values["gpu_idle"] * run.totals["decode"].step_ms / 5)
    assert values["decode_gb"] == pytest.approx(run.totals["decode"].bytes / 5e9)


def test_every_policy_is_a_system_or_an_ablation():
    ablations = {"ea_only", "sa_only", "no_assign", "fixed_p"}
    assert {s.spec.partition("(")[0] for s in SYSTEMS} == set(names()) - ablations
    assert chosen(["all"]) == list(SYSTEMS) and [s.name for s in chosen(["apex", "fixed_p(p=2)"])] == ["apex", "fixed_p(p=2)"]
    for bad, said in ((["best"], "unknown policy 'best'"), (["clairvoyant"], "reference row"), ([], "no system")):
        with pytest.raises(ValueError, match=said):
            chosen(bad)


def test_rows_over_seeds():
    places = [Place(Workload(batch=2, prompt=2, steps=3), "pinned-link", 8)]
    rows = compare([BY_NAME["apex"]], places, (0, 1))
    assert [r.system for r in rows] == [BY_NAME["apex"], *BESIDE] and {r.seeds for r in rows} == {2}
    single = [run_once(BY_NAME["apex"], Place(Workload(batch=2, prompt=2, steps=3, seed=s), "pinned-link", 8))["ttft_ms"] for s in (0, 1)]
    assert rows[0].mean["ttft_ms"] == pytest.approx(np.mean(single))
    assert rows[1].percent_of_clairvoyant == 100 and rows[0].lossless
    assert "| `apex` |" in write(rows, "a command")


def test_lossy_rows_say_so_and_move_fewer_bytes():
    """FlexGen's copies depend on no time; int8 in groups of 64 is 33/64 of two-byte weights, int4 17/64."""
    place = Place(Workload(batch=2, prompt=2, steps=4), "pinned-link", 24)
    systems = [BY_NAME["flexgen"], *(System(f"flexgen_{name}", "flexgen", "-", payload=name) for name in ("int8", "int4")), BY_NAME["mira_int8"]]
    rows = compare(systems, [place])
    assert [r.lossless for r in rows] == [True, False, False, False, True, True]
    gb = [r.mean["decode_gb"] for r in rows[:3]]
    assert gb[1] / gb[0] == pytest.approx(33 / 64, rel=1e-6) and gb[2] / gb[0] == pytest.approx(17 / 64, rel=1e-6)
    assert rows[0].mean["ttft_ms"] > rows[1].mean["ttft_ms"] > rows[2].mean["ttft_ms"]
    page, table = write(rows, "a command"), as_text(rows)
    assert "| NO, int8 |" in page and "apexk payload" in page and "NO, int4" in table and "apexk payload" in table
