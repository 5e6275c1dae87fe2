"""Views, plans and costs as JSON values and back, exactly, so that a recorded decision can be made again.

Python writes the shortest decimal that reads back to the same float, so a JSON round trip changes nothing.
"""

from __future__ import annotations

from .cost_affine import AffineCosts
from .cost_rates import RateCosts
from .types import Costs, InFlight, Plan, RouteView

_COSTS = {"affine": AffineCosts, "rates": RateCosts}


def costs_from_dict(data: dict) -> Costs:
    """Inverse of `Costs.as_dict`."""
    kind = data.get("kind")
    if kind not in _COSTS:
        raise ValueError(f"unknown cost model {kind!r}; there are {', '.join(_COSTS)}")
    return _COSTS[kind](**{key: value for key, value in data.items() if key != "kind"})


def view_to_dict(view: RouteView) -> dict:
    """`loads` becomes a list of [expert, load], by expert; sets become sorted lists."""
    return {
        "step": view.step,
        "layer": view.layer,
        "phase": view.phase,
        "tokens": view.tokens,
        "loads": [[e, view.loads[e]] for e in sorted(view.loads)],
        "resident": sorted(view.resident),
        "available": view.available,
        "costs": view.costs.as_dict(),
        "in_flight": None if view.in_flight is None else [view.in_flight.expert, view.in_flight.left],
        "channel_wait_ms": view.channel_wait_ms,
        "resident_first": view.resident_first,
        "memory": view.memory,
    }


def view_from_dict(data: dict) -> RouteView:
    """Inverse of `view_to_dict`."""
    in_flight = data["in_flight"]
    special = {
        "loads": {expert: load for expert, load in data["loads"]},
        "resident": frozenset(data["resident"]),
        "costs": costs_from_dict(data["costs"]),
        "in_flight": None if in_flight is None else InFlight(*in_flight),
    }
    return RouteView(**{**data, **special})


def plan_to_dict(plan: Plan) -> dict:
    return {
        "gpu_resident": list(plan.gpu_resident),
        "exact_fetch": list(plan.exact_fetch),
        "cpu": list(plan.cpu),
        "est_cpu_ms": plan.est_cpu_ms,
        "est_gpu_ms": plan.est_gpu_ms,
        "estimates": [list(pair) for pair in plan.estimates],
        "split": [list(pair) for pair in plan.split],
    }


def plan_from_dict(data: dict) -> Plan:
    """Inverse of `plan_to_dict`."""
    lists = {key: tuple(data[key]) for key in ("gpu_resident", "exact_fetch", "cpu")}
    pairs = {key: tuple(tuple(pair) for pair in data.get(key, ())) for key in ("estimates", "split")}
    return Plan(**{**data, **lists, **pairs})


def decision_to_dict(policy: str, view: RouteView, plan: Plan) -> dict:
    """The `decision` field of a timeline's `plan` row: the policy's name, what it saw, what it estimated, what it chose."""
    choice = plan_to_dict(plan)
    return {"policy": policy, "inputs": view_to_dict(view), "estimates": choice.pop("estimates"), "choice": choice}


def decision_from_dict(data: dict) -> tuple[str, RouteView, Plan]:
    """Inverse of `decision_to_dict`. `get(name).on_route(view) == plan` for a true record."""
    plan = plan_from_dict({**data["choice"], "estimates": data["estimates"]})
    return data["policy"], view_from_dict(data["inputs"]), plan
