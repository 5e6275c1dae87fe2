"""What is compared: requests with a prompt each, then decode steps, from a trace of decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from apexk.sim import trace
from apexk.sim.demand import Demand, demand_of
from apexk.sim.generate import MODELS, generate
from apexk.sim.trace import PREFILL, Trace


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt` tokens each in one pass, then `steps` decode steps; or a trace file (`path`). Predictions of a
    generated trace reach `look_ahead` layers."""

    preset: str = "mmlu-like"
    model: str = "qwen3_5"
    batch: int = 16
    prompt: int = 64
    steps: int = 40
    seed: int = 0
    path: str | None = None
    look_ahead: int = 1

    @property
    def label(self) -> str:
        return Path(self.path).name.removesuffix(".trace.npz") if self.path else self.preset


@lru_cache(maxsize=4)
def demand(work: Workload) -> Demand:
    """The demand of a workload; the newest ones are kept. Raises ValueError for what does not exist."""
    if work.path is not None:
        found = trace.read(work.path)
        return demand_of(found if (found.phase == PREFILL).any() else prompted(found, work.prompt))
    if work.model not in MODELS:
        raise ValueError(f"unknown model {work.model!r}; there are {', '.join(MODELS)}")
    made = generate(work.preset, shape=MODELS[work.model], batch=work.batch, steps=work.prompt + work.steps, seed=work.seed, look_ahead=work.look_ahead)
    return demand_of(prompted(made, work.prompt))


def prompted(found: Trace, prompt: int) -> Trace:
    """`found` with its first `prompt` decode steps as one prefill pass: each position of a prompt routes as the decode step
    at that position would, so that what a prompt is about carries over into what follows it."""
    steps = int(found.step.max()) + 1 if found.tokens else 0
    if (found.phase == PREFILL).any():
        raise ValueError(f"{found.source} has a prefill of its own")
    if not 1 <= prompt < steps:
        raise ValueError(f"a prompt of {prompt} tokens needs at least 1 and leaves no decode step of the trace's {steps} ({found.source})")
    ahead = found.step < prompt
    order = np.lexsort((found.position, found.request, np.where(ahead, 0, found.step)))
    step = np.where(ahead, 0, found.step - prompt + 1).astype(found.step.dtype)
    phase = np.where(ahead, PREFILL, found.phase).astype(found.phase.dtype)
    rows = {name: array[order] for name, array in (found.arrays() | {"step": step, "phase": phase}).items() if name != "profile_counts"}
    return replace(found, **rows, source=f"{found.source}, prompts of {prompt}")
