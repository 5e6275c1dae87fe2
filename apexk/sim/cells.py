"""Tables of runs: every combination of trace, hardware, pool and policy, over seeds, in several processes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from apexk import hardware
from apexk.hardware import Hardware
from apexk.policy import registry
from apexk.sim import references, trace
from apexk.sim.demand import Demand, demand_of
from apexk.sim.generate import MODELS, generate
from apexk.sim.named import REFERENCES
from apexk.sim.offset import refit
from apexk.sim.run import simulate
from apexk.store.quantised import half_precision_ratio
from apexk.workers import spread

#: two-sided 95 % quantiles of Student's t for 1..10 degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
REFIT_BATCH = 16


@dataclass(frozen=True)
class TraceSpec:
    """A trace by file (`path`), or by preset, model, batch, steps, phase and seed."""

    preset: str = "mmlu-like"
    model: str = "qwen3_5"
    batch: int = 16
    steps: int = 50
    phase: str = "decode"
    seed: int = 0
    path: str | None = None
    look_ahead: int = 1  # layers that predictions reach in a generated trace; a policy that looks farther gets what it needs


@dataclass(frozen=True)
class Cell:
    """One run. `changes` are hardware constants to replace ("cpu.c0": 0.3), `config` settings of `ApexConfig`."""

    spec: TraceSpec
    machine: str
    policy: str
    pool: int
    refit: bool = False
    scale_experts: bool = False
    warmup: int = 10
    config: tuple[tuple[str, object], ...] = ()
    changes: tuple[tuple[str, float], ...] = ()
    popularity: str | None = None


@dataclass
class Row:
    """A cell's figures over its seeds; `mean[name]` and `half[name]` (half of the 95 % interval, None with one seed)."""

    cell: Cell
    seeds: int
    mean: dict[str, float] = field(default_factory=dict)
    half: dict[str, float | None] = field(default_factory=dict)
    percent_of_clairvoyant: float | None = None

    def as_dict(self) -> dict:
        cell, spec = self.cell, self.cell.spec
        where = {"trace": spec.path or spec.preset, "model": spec.model if not spec.path else None, "batch": spec.batch, "phase": spec.phase,
                 "hardware": cell.machine, "pool": cell.pool, "policy": cell.policy, "changes": dict(cell.changes), "config": dict(cell.config)}
        return where | {"seeds": self.seeds, "mean": self.mean, "half_95": self.half, "percent_of_clairvoyant": self.percent_of_clairvoyant,
                        "modelled": True}


#: figures of a run, per layer and step where the name says so
FIGURES = ("tokens_per_s", "ms_per_step", "cpu_path_ms_per_layer", "gpu_path_ms_per_layer", "exact_per_layer", "speculative_per_layer",
           "used_per_layer", "hit_rate", "cpu_share", "active_per_layer", "bytes_per_step", "guarded_per_layer", "estimate_error", "layer_steps_per_s",
           "gpu_imbalance")


@lru_cache(maxsize=4)
def demand(spec: TraceSpec) -> Demand:
    """The demand of a spec; the newest ones are kept."""
    if spec.path is not None:
        found = trace.read(spec.path)
        return demand_of(trace.first_steps(found, spec.steps) if spec.steps else found)
    if spec.model not in MODELS:
        raise ValueError(f"unknown model {spec.model!r}; there are {', '.join(MODELS)}")
    return demand_of(generate(spec.preset, shape=MODELS[spec.model], batch=spec.batch, steps=spec.steps, seed=spec.seed, phase=spec.phase,
                              look_ahead=spec.look_ahead))


@lru_cache(maxsize=16)
def machine_of(cell: Cell) -> Hardware:
    """The cell's hardware with its changes, scaled to the model's experts and refitted as it asks. Key it by `_machine_key`."""
    machine = hardware.load(cell.machine)
    if cell.scale_experts and cell.spec.path is None and cell.spec.model in EXPERT_BYTES:
        machine = scaled(machine, EXPERT_BYTES[cell.spec.model])
    if cell.refit:
        spec = replace(cell.spec, batch=REFIT_BATCH, phase="decode") if cell.spec.path is None else cell.spec
        machine = refit(demand(spec), machine, pool=min(64, demand(spec).experts), warmup=cell.warmup)
    for name, value in cell.changes:
        machine = hardware.changed(machine, name, value)
    return machine


EXPERT_BYTES = {"qwen3_5": 6291456, "qwen3_next": 6291456, "glm_4_5_air": 34603008}


def scaled(machine: Hardware, bytes_per_expert: int) -> Hardware:
    """Costs per expert and per pair in proportion to the expert's bytes; fixed costs as they are. Timing data of other
    models is missing, so this is an assumption."""
    by = bytes_per_expert / machine.model.get("bytes_per_expert", bytes_per_expert)
    return replace(
        machine, model=machine.model | {"bytes_per_expert": bytes_per_expert},
        cpu=replace(machine.cpu, a=machine.cpu.a * by, b=machine.cpu.b * by), link=replace(machine.link, t1=machine.link.t1 * by),
        gpu=replace(machine.gpu, g1=machine.gpu.g1 * by, g2=machine.gpu.g2 * by),
    )  # fmt: skip


def carrying(machine: Hardware, payload: str) -> Hardware:
    """`machine` with copies in this payload (as `ApexConfig.payload`) of half-precision weights."""
    return machine if payload == "plain" else hardware.with_payload(machine, half_precision_ratio(payload))


def run_cell(cell: Cell) -> dict[str, float]:
    """`FIGURES` of one cell. Runs in a worker process."""
    wanted = demand(_far_enough(cell))
    machine = machine_of(replace(cell, policy="", pool=0, config=(), popularity=None))
    policy, given, pool = cell.policy, wanted, cell.pool
    if policy in REFERENCES:
        reference = references.resolve(policy, wanted, machine, pool)
        policy, given, pool = reference.policy, reference.demand, reference.pool
    counts = _popularity(cell.popularity, wanted)
    run = simulate(given, machine, policy, pool, warmup=cell.warmup, config=dict(cell.config), popularity=counts)
    return figures(run)


def _far_enough(cell: Cell) -> TraceSpec:
    ahead = 1 if cell.policy in REFERENCES else registry.get(cell.policy).look_ahead
    return replace(cell.spec, look_ahead=max(ahead, cell.spec.look_ahead))


def _popularity(path: str | None, wanted: Demand) -> list[list[int]] | None:
    if path is None:
        return None
    from apexk.sim.popularity import read

    return read(path, model=wanted.model, layers=wanted.layers, experts=wanted.experts).counts


def figures(run) -> dict[str, float]:
    """The figures of a run's main phase: decode if it has any."""
    phase = "decode" if run.totals["decode"].steps else "prefill"
    t = run.totals[phase]
    report = t.report()
    pairs = t.tokens * run.engine.shape.topk * run.engine.shape.layers
    layers = max(t.layers, 1)
    values = {name: report[name] for name in ("tokens_per_s", "ms_per_step", "cpu_path_ms_per_layer", "gpu_path_ms_per_layer", "hit_rate")}
    values |= {
        "exact_per_layer": t.exact / layers, "speculative_per_layer": t.speculative / layers, "used_per_layer": t.used / layers,
        "active_per_layer": t.active / layers, "cpu_share": t.cpu_pairs / pairs if pairs else 0.0, "bytes_per_step": t.bytes / max(t.steps, 1),
        "guarded_per_layer": getattr(run.engine.policy, "guarded_layers", 0) / max(run.layer_steps, 1),
        "estimate_error": report["mean_estimate_error"], "layer_steps_per_s": run.layer_steps / run.seconds if run.seconds else 0.0,
        "gpu_imbalance": getattr(run.engine.device, "imbalance", 1.0),
    }  # fmt: skip
    return {name: 0.0 if value is None else value for name, value in values.items()}


def run_table(cells: Sequence[Cell], seeds: Iterable[int] = (0,), *, jobs: int = 1, said: Callable[[int, int], None] | None = None) -> list[Row]:
    """Each cell over `seeds` (of its preset; a trace file has one run), with percent of the clairvoyant row where the table
    has it. `said(done, all)` is told of progress."""
    seeds = tuple(seeds)
    work = [(i, replace(c, spec=replace(c.spec, seed=s))) for s in seeds for i, c in enumerate(cells) if c.spec.path is None or s == seeds[0]]
    work.sort(key=lambda item: (str(item[1].spec), item[1].machine, item[1].changes))
    found: dict[int, list[dict[str, float]]] = {i: [] for i in range(len(cells))}
    for done, ((i, _), result) in enumerate(zip(work, _map([c for _, c in work], jobs), strict=True), 1):
        found[i].append(result)
        if said:
            said(done, len(work))
    rows = [_row(cell, found[i]) for i, cell in enumerate(cells)]
    best = {_place(r.cell): r.mean["tokens_per_s"] for r in rows if r.cell.policy == "clairvoyant"}
    for r in rows:
        if _place(r.cell) in best:
            r.percent_of_clairvoyant = 100 * r.mean["tokens_per_s"] / best[_place(r.cell)]
    return rows


def _map(cells: list[Cell], jobs: int):
    if jobs <= 1 or len(cells) < 2:
        yield from map(run_cell, cells)
        return
    yield from spread(run_cell, cells, jobs, chunk=max(1, min(8, len(cells) // (4 * jobs))))


def _place(cell: Cell) -> tuple:
    return (cell.spec, cell.machine, cell.pool, cell.changes, cell.refit)


def _row(cell: Cell, results: list[dict[str, float]]) -> Row:
    row = Row(cell, len(results))
    for name in FIGURES:
        mean, half = interval([r[name] for r in results])
        row.mean[name], row.half[name] = mean, half
    return row


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, half width of its 95 % interval by Student's t); None for a single value."""
    n = len(values)
    if n < 2:
        return values[0], None
    t = T95[n - 2] if n - 2 < len(T95) else 1.96
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n)
