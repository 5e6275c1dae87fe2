"""The policies by name, with arguments (`fixed_p(p=4)`), and those of others: `module:Class` or an entry point."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import fields, replace
from importlib.metadata import entry_points

from .apex import Apex, ApexPaper
from .base import DEFAULTS, SCOPES, Policy
from .cox_moe import CoXMoE
from .dali import Dali
from .ea_only import ExactOnly
from .fiddler import FiddlerOriginal, FiddlerStatic
from .fixed_p import FixedCount
from .freetoken import FreeTokenQ
from .hybrimoe import HybriMoE
from .ktransformers import KTDynamic, KTStatic
from .layer_stream import FlexGen, MoELightning
from .llamacpp import CpuLayers, IkLlamaCpp, LlamaCpp
from .mira import Mira
from .mixtral_offloading import MixtralOffloading
from .no_assign import NoAssignment
from .post_fetch import PostFetch
from .replication import Replication
from .sa_only import SpeculativeOnly
from .types import PolicyOptions

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Apex, ApexPaper, ExactOnly, SpeculativeOnly, NoAssignment, FixedCount, FiddlerStatic, FiddlerOriginal, MixtralOffloading, PostFetch,
        LlamaCpp, IkLlamaCpp, CpuLayers, HybriMoE, FreeTokenQ, Dali, KTStatic, KTDynamic, Replication, Mira, FlexGen, MoELightning, CoXMoE,
    )
}  # fmt: skip
ENTRY_POINTS = "apexk.policies"


def names() -> tuple[str, ...]:
    """Every policy's name, Apex first."""
    return tuple(POLICIES)


def check(spec: str) -> None:
    """Raise ValueError unless `get` could make a policy from `spec`."""
    get(spec)


def get(spec: str, options: PolicyOptions = DEFAULTS) -> Policy:
    """A new policy object from `name`, `name(key=value, ...)`, `module:Class` or the name of an entry point in `apexk.policies`.

    Keys are `PolicyOptions` fields or the policy's own arguments. Raises ValueError with what there is.
    """
    name, given = _split(spec)
    made = _class(name)
    shared = {f.name for f in fields(PolicyOptions)}
    own = {p for p in inspect.signature(made.__init__).parameters if p not in ("self", "options")}
    unknown = sorted(given.keys() - shared - own)
    if unknown:
        raise ValueError(f"policy {name!r} takes no {', '.join(unknown)}; it takes {', '.join(sorted(own | shared))}")
    options = replace(options, **{k: v for k, v in given.items() if k in shared})
    policy = made(options, **{k: v for k, v in given.items() if k in own})
    if given or name not in POLICIES:
        policy.name = spec  # what a record must say to make the policy again
    return policy


def _class(name: str) -> type[Policy]:
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"policy {name!r}: {error}") from error
    else:
        point = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
        if point is None:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}, and module:Class of your own")
        found = point.load()
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"policy {name!r} is no subclass of apexk.policy.Policy")
    require_contract(name, found)
    return found


def require_contract(name: str, found: type[Policy]) -> None:
    """Raises ValueError unless a policy's class says what the engine must know of it, and contradicts itself nowhere."""
    lacking = [key for key in ("name", "source", "speculates", "fetches", "waits_in_flight") if not hasattr(found, key)]
    if lacking:
        raise ValueError(f"policy {name!r} does not say {', '.join(lacking)}")
    if type(found.look_ahead) is not int or found.look_ahead < 1:
        raise ValueError(f"policy {name!r}: look_ahead is {found.look_ahead!r}; wanted a number of layers, at least 1")
    if not isinstance(found.pool_scopes, (tuple, list)) or not found.pool_scopes or any(scope not in SCOPES for scope in found.pool_scopes):
        raise ValueError(f"policy {name!r}: pool_scopes is {found.pool_scopes!r}; wanted some of {SCOPES}")
    chooses = (found.victims, found.victims_for) != (Policy.victims, Policy.victims_for) and found.victims_anywhere is Policy.victims_anywhere
    if "global" in found.pool_scopes and (found.posts or chooses):
        why = "copies after a step" if found.posts else "chooses victims of its own, but none over all layers (victims_anywhere)"
        raise ValueError(f"policy {name!r} {why}, so it must set pool_scopes = ('layer',)")
    if found.fetches and found.speculates and not found.waits_in_flight:
        raise ValueError(f"policy {name!r} fetches and prefetches, so it must set waits_in_flight: else it could copy an expert that is on its way")


def _split(spec: str) -> tuple[str, dict]:
    """`name(a=1, b=word)` -> (name, {a: 1, b: "word"})."""
    name, open_, inside = spec.strip().partition("(")
    if not open_:
        return name, {}
    if not inside.endswith(")"):
        raise ValueError(f"policy {spec!r}: a closing parenthesis is missing")
    given = {}
    for part in filter(None, (p.strip() for p in inside[:-1].split(","))):
        key, sign, text = part.partition("=")
        if not sign:
            raise ValueError(f"policy {spec!r}: {part!r} is not key=value")
        try:
            given[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            given[key.strip()] = text.strip()
    return name.strip(), given
