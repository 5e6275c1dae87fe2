"""Decides where each expert runs: policies over integers and rates. Standard library only; no tensors, no clock."""

from .base import Policy
from .check import PlanError, check_plan
from .evict import exact_candidates, prefetch_candidates
from .registry import get, names
from .replay import (
    costs_from_dict,
    decision_from_dict,
    decision_to_dict,
    plan_from_dict,
    plan_to_dict,
    view_from_dict,
    view_to_dict,
)
from .types import (
    CostPrior,
    Costs,
    InFlight,
    ModelShape,
    Observation,
    Phase,
    Plan,
    PolicyOptions,
    Prediction,
    RouteView,
)

__all__ = [
    "CostPrior", "Costs", "InFlight", "ModelShape", "Observation", "Phase", "Plan", "PlanError", "Policy",
    "PolicyOptions", "Prediction", "RouteView", "check_plan", "costs_from_dict", "decision_from_dict",
    "decision_to_dict", "exact_candidates", "get", "names", "plan_from_dict", "plan_to_dict", "prefetch_candidates",
    "view_from_dict", "view_to_dict",
]  # fmt: skip
