"""The paper's numbers (`targets.json`) and what each may be used for.

Roles: `fit` and `fit-soft` may calibrate; `held-out` must not; `seen` was looked at while a constant was chosen; `info` is no
target. `for_fit` is the only way a calibration reads a number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("targets.json")
FIT_ROLES = ("fit", "fit-soft")


@dataclass(frozen=True)
class Target:
    """One number or statement of the paper; `where` says in which part of it."""

    id: str
    value: object
    unit: str
    where: str
    role: str
    note: str = ""


@cache
def load() -> dict[str, Target]:
    """All targets by id, in the file's order."""
    data = json.loads(PATH.read_text(encoding="utf-8"))
    return {t["id"]: Target(t["id"], t["value"], t["unit"], t["where"], t["role"], t.get("note", "")) for t in data["targets"]}


def for_fit(id: str) -> float:
    """A number that a calibration may use; ValueError for one that it must not see."""
    target = load()[id]
    if target.role not in FIT_ROLES:
        raise ValueError(f"{id} has role {target.role!r}: a calibration may read {' and '.join(FIT_ROLES)} only")
    return float(target.value)
