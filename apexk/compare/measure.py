"""Runs every system on every workload, machine and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from apexk import hardware
from apexk.compare.meter import Meter
from apexk.compare.systems import System
from apexk.compare.workload import Workload, demand
from apexk.hardware import Hardware
from apexk.policy import registry
from apexk.sim import references
from apexk.sim.cells import EXPERT_BYTES, carrying, interval, scaled
from apexk.sim.named import REFERENCES
from apexk.sim.run import simulate
from apexk.workers import spread

#: shown beside the systems: what knowing the future is worth, and a GPU that holds everything
BESIDE = (System("clairvoyant", "clairvoyant", "true costs, Belady's rule, the next layer's true demand"), System("all_resident", "all_resident", "every expert has a slot"))
NS, GB = 1e6, 1e9


@dataclass(frozen=True)
class Place:
    """Where systems meet: a workload, a machine and `pool` slots a layer. `scale` costs by the model's expert bytes."""

    work: Workload
    machine: str
    pool: int
    scale: bool = False

    @property
    def label(self) -> str:
        return f"{self.work.label} on {Path(self.machine).name.removesuffix('.json')}"


@dataclass
class Row:
    """A system's figures at a place over seeds: means and half widths of their 95 % intervals (None with one seed)."""

    system: System
    place: Place
    seeds: int
    mean: dict[str, float | None] = field(default_factory=dict)
    half: dict[str, float | None] = field(default_factory=dict)
    percent_of_clairvoyant: float | None = None

    @property
    def reference(self) -> bool:
        return self.system in BESIDE

    @property
    def lossless(self) -> bool:
        return self.reference or self.system.lossless


#: figure -> (unit, what it is)
FIGURES = {
    "decode_tokens_per_s": ("tokens/s", "decode steps, all requests"),
    "prefill_tokens_per_s": ("tokens/s", "the prompts' one pass"),
    "ttft_ms": ("ms", "time to first token: that pass"),
    "gpu_busy": ("share", "of decode time that the GPU works: attention, experts, merge"),
    "gpu_idle": ("share", "of decode time that it does not; the rest is the hardware file's kappa"),
    "for_weights": ("share", "of decode time that the GPU stands still while the layer's copies run"),
    "for_cpu": ("share", "of decode time that it stands still otherwise: for the CPU's rows"),
    "stall_ms": ("ms a step", "both together"),
    "link_busy": ("share", "of decode time that the link copies experts"),
    "cpu_busy": ("share", "of decode time that the CPU path runs"),
    "decode_gb": ("GB a step", "expert bytes asked of the link in decode"),
    "prefill_gb": ("GB", "and in the prefill"),
    "hit_rate": ("share", "of decode's active experts that are resident when the routing is known"),
    "cpu_share": ("share", "of decode's (token, expert) pairs that the CPU computes"),
}


@lru_cache(maxsize=16)
def machine_of(name: str, model: str | None) -> Hardware:
    machine = hardware.load(name)
    return scaled(machine, EXPERT_BYTES[model]) if model in EXPERT_BYTES else machine


def run_once(system: System, place: Place) -> dict[str, float | None]:
    """`FIGURES` of one run, modelled. A figure of a phase that the workload lacks is None."""
    pool, policy = place.pool, system.spec
    ahead = 1 if policy in REFERENCES else registry.get(policy).look_ahead
    wanted = demand(replace(place.work, look_ahead=ahead))
    machine = carrying(machine_of(place.machine, place.work.model if place.scale and not place.work.path else None), system.payload)
    if policy in REFERENCES:
        found = references.resolve(policy, wanted, machine, pool)
        policy, wanted, pool = found.policy, found.demand, found.pool
    meter = Meter()
    run = simulate(wanted, machine, policy, pool, warmup=0, timeline=meter)
    meter.close_layer()
    values: dict[str, float | None] = dict.fromkeys(FIGURES)
    prefill, decode = run.totals["prefill"], run.totals["decode"]
    if prefill.steps:
        values |= {"prefill_tokens_per_s": 1e3 * prefill.tokens / prefill.step_ms, "ttft_ms": prefill.step_ms / prefill.steps,
                   "prefill_gb": prefill.bytes / prefill.steps / GB}  # fmt: skip
    if decode.steps:
        lanes, ns, steps = meter.phases["decode"], decode.step_ms * NS, decode.steps
        values |= {
            "decode_tokens_per_s": 1e3 * decode.tokens / decode.step_ms, "decode_gb": decode.bytes / steps / GB, "hit_rate": decode.hits / decode.active,
            "cpu_share": decode.cpu_pairs / (decode.tokens * wanted.topk * wanted.layers),
            "gpu_busy": lanes.gpu / ns, "gpu_idle": max(0.0, 1 - (lanes.gpu + lanes.unattributed) / ns), "link_busy": lanes.link / ns, "cpu_busy": lanes.cpu / ns,
            "for_weights": lanes.for_weights / ns, "for_cpu": lanes.for_cpu / ns, "stall_ms": (lanes.for_weights + lanes.for_cpu) / NS / steps,
        }  # fmt: skip
    return values


def compare(systems: Sequence[System], places: Sequence[Place], seeds: Sequence[int] = (0,), *, jobs: int = 1,
            said: Callable[[int, int], None] | None = None) -> list[Row]:
    """Rows of every system and of `BESIDE` at every place, in that order; a trace file has one run whatever the seeds."""
    work = [(system, replace(place, work=replace(place.work, seed=seed)))
            for place in places for seed in (seeds if place.work.path is None else seeds[:1]) for system in (*systems, *BESIDE)]
    found: dict[tuple[System, Place], list[dict]] = {}
    for done, ((system, place), values) in enumerate(zip(work, _results(work, jobs), strict=True), 1):
        found.setdefault((system, replace(place, work=replace(place.work, seed=0))), []).append(values)
        if said:
            said(done, len(work))
    rows = [_row(system, place, results) for (system, place), results in found.items()]
    best = {row.place: row.mean["decode_tokens_per_s"] for row in rows if row.system == BESIDE[0]}
    for row in rows:
        if best[row.place]:
            row.percent_of_clairvoyant = 100 * row.mean["decode_tokens_per_s"] / best[row.place]
    return rows


def _row(system: System, place: Place, results: list[dict]) -> Row:
    row = Row(system, place, len(results))
    for name in FIGURES:
        values = [r[name] for r in results]
        row.mean[name], row.half[name] = (None, None) if None in values else interval(values)
    return row


def _results(work: Sequence[tuple[System, Place]], jobs: int) -> Iterator[dict]:
    if jobs <= 1 or len(work) < 2:
        return map(_one, work)
    return spread(_one, work, jobs, chunk=max(1, min(8, len(work) // (4 * jobs))))


def _one(item: tuple[System, Place]) -> dict[str, float | None]:
    return run_once(*item)
