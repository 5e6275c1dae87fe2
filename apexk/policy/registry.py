"""The policies by name."""

from __future__ import annotations

from .apex import Apex, ApexPaper
from .base import DEFAULTS, Policy
from .ea_only import ExactOnly
from .no_assign import NoAssignment
from .sa_only import SpeculativeOnly
from .types import PolicyOptions

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Apex, ApexPaper, ExactOnly, SpeculativeOnly, NoAssignment)
}


def names() -> tuple[str, ...]:
    """Every policy's name, Apex first."""
    return tuple(POLICIES)


def get(name: str, options: PolicyOptions = DEFAULTS) -> Policy:
    """A new policy object; `ValueError` with the list of names if there is none called `name`."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](options)
