"""The constants of the hardware file `a6000-paper`, derived again from the paper's numbers that may be fitted.

    CPU      c0 + b*pairs                Fig. 3(c), pools 32 and 96, pairs = share * 128 (batch 16, top-8)
    copies   s0 + t1*p                   Fig. 3(d), P = 2 and 4
    kappa    layer time over path time   Table 3, none and SA
"""

from __future__ import annotations

from apexk.paper.targets import for_fit

PAIRS = 16 * 8
LAYERS = 40
BATCH = 16


def constants() -> dict[str, float]:
    """{"cpu.c0", "cpu.b", "link.s0", "link.t1", "layer.kappa"} in ms (kappa: a ratio)."""
    b, c0 = _line(
        (PAIRS * for_fit("fig3c.r32.cpu_share"), for_fit("fig3c.r32.cpu")), (PAIRS * for_fit("fig3c.r96.cpu_share"), for_fit("fig3c.r96.cpu"))
    )
    t1, s0 = _line((2, for_fit("fig3d.P2.xfer")), (4, for_fit("fig3d.P4.xfer")))
    none, sa = (1e3 * BATCH / LAYERS / for_fit(id) for id in ("table3.none.tput", "derived.table3.sa.tput"))
    kappa, _ = _line((for_fit("table3.none.cpu"), none), (for_fit("table3.sa.cpu"), sa))
    return {"cpu.c0": c0, "cpu.b": b, "link.s0": s0, "link.t1": t1, "layer.kappa": kappa}


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(slope, intercept) through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return slope, first[1] - slope * first[0]
