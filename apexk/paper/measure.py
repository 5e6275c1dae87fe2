"""Runs what the figures ask for. A figure is a function of `get`; it is called twice, first to learn what it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from apexk.sim.cells import Cell, Row, TraceSpec, run_table

HARDWARE = "a6000-paper"
APEX = "apex(waves=false)"  # the paper has no waves
#: at least 40 counted steps and three seeds where a band must hold; shorter where a figure is only reported
FULL = {"steps": 50, "warmup": 10}
SHORT = {"steps": 24, "warmup": 6}
PASSES = {"steps": 8, "warmup": 2}  # of a prefill
#: tokens of one prefill pass per request: the paper does not say; about 100 at batch 16 gives its order of methods
PASS_TOKENS = 6


@dataclass(frozen=True)
class Ask:
    """One run: a policy at a pool (slots a layer), batch, model and phase."""

    policy: str
    pool: int = 64
    batch: int = 16
    model: str = "qwen3_5"
    phase: str = "decode"
    full: bool = True

    def cell(self) -> Cell:
        prefill = self.phase == "prefill"
        length = PASSES if prefill else FULL if self.full else SHORT
        batch = self.batch * PASS_TOKENS if prefill else self.batch
        spec = TraceSpec("mmlu-like", self.model, batch, length["steps"], self.phase)
        # the layer offset is fitted to the one model and phase that has timing data; other models scale by expert bytes
        fitted = self.model == "qwen3_5" and not prefill
        return Cell(spec, HARDWARE, self.policy, self.pool, fitted, self.model != "qwen3_5", length["warmup"])


Get = Callable[..., dict[str, float]]


class Measurements:
    """Results of runs by what was asked; `measure` fills them."""

    def __init__(self, seeds: Sequence[int] = (0, 1, 2), jobs: int = 1):
        self.seeds, self.jobs = tuple(seeds), jobs
        self.rows: dict[Ask, Row] = {}

    def measure(self, figures: Sequence[Callable[[Get], list]], said: Callable[[int, int], None] | None = None) -> None:
        """Runs everything that `figures` will ask for and that is not there yet."""
        wanted: dict[Ask, None] = {}

        def dry(*args, **more):
            wanted.setdefault(Ask(*args, **more))
            return defaultdict(lambda: 1.0)

        for figure in figures:
            figure(dry)
        missing = [ask for ask in wanted if ask not in self.rows]
        done = 0
        for full in (True, False):
            asks = [a for a in missing if (a.full and a.phase == "decode") == full]
            seeds = self.seeds if full else self.seeds[:1]

            def tell(now: int, _: int, done: int = done) -> None:
                if said:
                    said(done + now, sum((len(self.seeds) if a.full and a.phase == "decode" else 1) for a in missing))

            for ask, row in zip(asks, run_table([a.cell() for a in asks], seeds, jobs=self.jobs, said=tell), strict=True):
                self.rows[ask] = row
            done += len(asks) * len(seeds)

    def get(self, *args, **more) -> dict[str, float]:
        """Mean figures (`apexk.sim.cells.FIGURES`) over the seeds."""
        return self.rows[Ask(*args, **more)].mean

    def changed(self, ask: Ask, **constants: float) -> Cell:
        """The cell of an ask with hardware constants replaced; for sensitivity."""
        return replace(ask.cell(), changes=tuple(constants.items()))
