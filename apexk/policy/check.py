"""Refuses a plan that breaks the engine's rules. A policy that makes one has a bug; nothing is repaired."""

from __future__ import annotations

from collections.abc import Sequence

from .types import Plan, RouteView


class PlanError(ValueError):
    """A policy returned a plan that the engine must not run."""


def check_plan(view: RouteView, plan: Plan, waves: bool = False, policy: str = "") -> None:
    """Raise `PlanError`, which names `policy` if that is given, unless `plan` is a `Plan` and

    - `gpu_resident`, `exact_fetch` and `cpu` together hold each active expert exactly once and nothing else,
    - `gpu_resident` holds residents only and `exact_fetch` missed experts only,
    - the exact copies fit into `view.available` slots (the copy in flight has a slot of its own), unless they run in waves,
    - `split` names experts with a slot, each once, and leaves pairs to both sides; none where copies may run in waves, whose
      rows are summed by expert.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"{_where(view, policy)}: on_route returned {type(plan).__name__}, wanted a Plan")
    here, copied, resident = plan.gpu_resident, plan.exact_fetch, view.resident
    planned = (*here, *copied, *plan.cpu)
    if not (len(planned) == len(view.loads) and view.loads.keys() == set(planned) and resident.issuperset(here) and resident.isdisjoint(copied)):
        raise PlanError(f"{_where(view, policy)}: {_misplaced(view, plan, planned)}")
    if len(copied) > view.available and not waves:
        new = len(copied) - (view.in_flight is not None and view.in_flight.expert in copied)
        if new > view.available:
            raise PlanError(f"{_where(view, policy)}: {new} exact copies for {view.available} available slots")
    if plan.split:
        _check_split(_where(view, policy), view, plan, waves)


def _where(view: RouteView, policy: str) -> str:
    return f"policy {policy!r}, " * bool(policy) + f"layer {view.layer}, step {view.step}"


def _misplaced(view: RouteView, plan: Plan, planned: Sequence[int]) -> str:
    """What is wrong with a plan that is no partition of the active experts, or takes residents and missed ones for each other."""
    active, chosen = view.loads.keys(), set(planned)
    if len(chosen) != len(planned):
        return f"planned twice: {sorted({e for e in planned if planned.count(e) > 1})}"
    if chosen != active:
        return f"not planned: {sorted(active - chosen)}, planned but not active: {sorted(chosen - active)}"
    absent = chosen.intersection(plan.gpu_resident).difference(view.resident)
    if absent:
        return f"not resident but in gpu_resident: {sorted(absent)}"
    return f"resident but in exact_fetch: {sorted(view.resident.intersection(plan.exact_fetch))}"


def _check_split(where: str, view: RouteView, plan: Plan, waves: bool) -> None:
    experts = [e for e, _ in plan.split]
    if waves:
        raise PlanError(f"{where}: splits experts {experts}, and a policy whose copies may come in waves must not")
    if len(set(experts)) != len(experts):
        raise PlanError(f"{where}: split twice: {sorted({e for e in experts if experts.count(e) > 1})}")
    elsewhere = set(experts).difference(plan.gpu_resident, plan.exact_fetch)
    if elsewhere:
        raise PlanError(f"{where}: split but planned for no slot: {sorted(elsewhere)}")
    whole = [(e, n, view.loads[e]) for e, n in plan.split if not 0 < n < view.loads[e]]
    if whole:
        raise PlanError(f"{where}: a split leaves pairs to both sides, got (expert, pairs on the GPU, load): {whole}")
