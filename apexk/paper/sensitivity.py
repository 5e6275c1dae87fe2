"""The headline figures over a grid of hardware constants, never at one chosen point.

Each constant is varied alone over its range, and the four together at their corners: the CPU's fixed part c0, the transfer
set-up s0 (exact and speculative alike), the link's time per expert t1, and kappa.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from apexk import hardware
from apexk.paper.measure import APEX, FULL, HARDWARE
from apexk.paper.results import gain
from apexk.sim.cells import Cell, TraceSpec, run_table

POLICIES = ("no_assign", "ea_only(cost=rates)", "apex(cost=rates, waves=false)", APEX, "clairvoyant")
#: constant -> values in ms (kappa: ratio); the hardware file's own is always among the points
RANGES = {"cpu.c0": (0.15, 0.5, 1.0), "link.s0": (0.02, 0.2), "link.t1": (0.197, 0.252), "layer.kappa": (1.0, 1.2)}


def points() -> list[dict[str, float]]:
    """Changes against the hardware file: none, one at a time, then every corner of best values and the file's own."""
    single = [{name: value} for name, values in RANGES.items() for value in values]
    best = {name: min(values) for name, values in RANGES.items()}
    corners = [dict(c) for n in (2, 3, 4) for c in itertools.combinations(best.items(), n)]
    return [{}, *single, *corners]


def grid(seeds: tuple[int, ...] = (0,), jobs: int = 1, said: Callable[[int, int], None] | None = None) -> list[dict]:
    """A dict a point: label, changes, tokens/s by policy, Apex's gain over no assignment, and percent of clairvoyant."""
    machine = hardware.load(HARDWARE)
    cells, places = [], points()
    for place in places:
        changes = dict(place)
        if "link.s0" in place:
            changes["link.s_sp"] = place["link.s0"]
        cells += [Cell(TraceSpec(steps=FULL["steps"]), HARDWARE, p, 64, True, False, FULL["warmup"], (), tuple(sorted(changes.items()))) for p in POLICIES]
    rows = run_table(cells, seeds, jobs=jobs, said=said)
    found = []
    for number, place in enumerate(places):
        speed = {row.cell.policy: row.mean["tokens_per_s"] for row in rows[number * len(POLICIES) : (number + 1) * len(POLICIES)]}
        label = ", ".join(f"{k}={v:g}" for k, v in place.items()) or f"* {machine.name}"
        found.append({"label": label, "changes": place, "tokens_per_s": speed, "gain_percent": gain(speed[APEX], speed["no_assign"]),
                      "percent_of_clairvoyant": 100 * speed[APEX] / speed["clairvoyant"]})
    return found
