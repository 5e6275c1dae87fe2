"""What a simulation names, looked at without the engine and torch, which take seconds to load: a slip of the pen is told at once."""

from __future__ import annotations

from collections.abc import Sequence

from apexk import hardware
from apexk.policy import registry
from apexk.sim import trace
from apexk.sim.generate import MODELS, PRESETS

REFERENCES = ("oracle_p", "foretold", "belady", "clairvoyant", "all_resident")  # see `apexk.sim.references`


def check_named(*, machines: Sequence[str], policies: Sequence[str] = (), traces: Sequence[str] = (), presets: Sequence[str] = (), model: str = "qwen3_5") -> None:
    """Raises ValueError or OSError, which say what there is, for the first that there is not. Presets and the model are not looked at where there are traces."""
    for machine in machines:
        hardware.load(machine)
    for policy in policies:
        if policy not in REFERENCES:
            registry.check(policy)
    for path in traces:
        trace.read(path)
    for what, value, known in () if traces else (("model", model, MODELS), *(("preset", preset, PRESETS) for preset in presets)):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}; there are {', '.join(known)}")
