"""Fig. 2: one decode step of pure GPU execution, static collaboration and Apex, as timelines."""

from __future__ import annotations

from pathlib import Path

from apexk import hardware
from apexk.paper.measure import APEX, HARDWARE
from apexk.paper.motivation import PURE_GPU
from apexk.sim.demand import demand_of
from apexk.sim.generate import Shape, generate
from apexk.sim.run import simulate
from apexk.timeline.writer import Timeline

PARADIGMS = {"pure-gpu": (PURE_GPU, 0), "static": ("no_assign", 64), "apex": (APEX, 64)}
LAYERS, STEPS = 4, 12


def write(folder: Path) -> list[Path]:
    """`fig2-NAME.timeline.jsonl` for each paradigm: a few layers of the modelled machine, after a warm-up."""
    demand = demand_of(generate(shape=Shape(layers=LAYERS), steps=STEPS))
    machine, written = hardware.load(HARDWARE), []
    for name, (policy, pool) in PARADIGMS.items():
        path = folder / f"fig2-{name}.timeline.jsonl"
        with Timeline(path) as timeline:
            timeline.header(versions={}, model={"moe_layers": LAYERS}, config={"policy": policy, "pool": pool}, hardware=machine.name, device="virtual")
            simulate(demand, machine, policy, pool, warmup=0, timeline=timeline)
        written.append(path)
    return written
