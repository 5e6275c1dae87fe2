"""The figures and tables by the names that the command line uses, and all rows together."""

from __future__ import annotations

from collections.abc import Callable

from apexk.paper import motivation, results
from apexk.paper.measure import Get, Measurements
from apexk.paper.rows import PaperRow, untouched

FIGURES: dict[str, Callable[[Get], list[PaperRow]]] = {
    "fig1": motivation.fig1, "fig3a": motivation.fig3a, "fig3b": motivation.fig3b, "fig3c": motivation.fig3c, "fig3d": motivation.fig3d,
    "fig5": results.fig5, "fig6": results.fig6, "fig7": results.fig7, "table1": motivation.table1, "table2": results.table2,
    "table3": results.table3, "pools": results.pools,
}  # fmt: skip
#: drawn from a run's timeline, without rows
TIMELINES = ("fig2",)


def rows(names: list[str], seeds: tuple[int, ...] = (0, 1, 2), jobs: int = 1, said=None) -> tuple[list[PaperRow], Measurements]:
    """Rows of the named figures; of all of them, the targets that no figure computes too, so that every target has its row."""
    measured = Measurements(seeds, jobs)
    chosen = [FIGURES[name] for name in names if name in FIGURES]
    measured.measure(chosen, said)
    found = [row for figure in chosen for row in figure(measured.get)]
    if set(names) >= set(FIGURES):
        found += untouched({row.id.partition(", ")[0] for row in found})
    return found, measured
