"""The transfer count: how many of a layer's missed experts are copied to the GPU so that both paths end together.

Missed experts are ordered heaviest first; copying the first p of them (their load is `S_p`, all missed `S_m`) gives

    T_cpu(p) = cpu_ms(m - p, S_m - S_p)
    T_gpu(p) = wait + copy_ms(p) + gpu_ms(nR + p, L_R + S_p)                                 residents wait for the copies
             = max(gpu_ms(nR, L_R), wait + copy_ms(p)) + gpu_ms(nR + p, L_R + S_p) - gpu_ms(nR, L_R)      resident first

for nR active residents with load L_R; without a copy there is neither wait nor copy time. The count is the smallest p
that minimises max(T_cpu, T_gpu). The rule and the ordering are the paper's; its equations were rebuilt from the text.

A speculative copy still under way for a missed expert (`view.in_flight`) goes to the head of the order, whatever its
load: it owns a slot already, so it does not count against `view.available`, its set-up is paid, and only its uncopied
fraction costs time. `view.channel_wait_ms` does not contain that fraction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from .native.scan import decide
from .types import Plan, RouteView

# Gains below this many ms are ties; a float of a few hundred ms is exact to about 1e-13.
TIE_MS = 1e-12


def by_load(view: RouteView) -> tuple[list[int], list[int]]:
    """(residents, missed) of the active experts, each heaviest first, ties by lower id; an in-flight copy leads `missed`."""
    loads, resident = view.loads, view.resident
    active = loads.keys()
    here, missed = sorted(active & resident), sorted(active - resident)
    for experts in (here, missed):
        experts.sort(key=loads.__getitem__, reverse=True)  # stable: equal loads keep ascending ids
    if view.in_flight is not None:
        expert = view.in_flight.expert
        if expert not in loads or expert in resident:
            raise ValueError(f"in-flight expert {expert} of layer {view.layer} is not a missed expert of step {view.step}")
        missed.remove(expert)
        missed.insert(0, expert)
    return here, missed


def most_copies(view: RouteView, missed: int) -> int:
    """Largest transfer count that the pool has slots for, out of `missed` experts."""
    return min(missed, view.available + (view.in_flight is not None))


def transfer_ms(view: RouteView, copies: int) -> float:
    """Time from the routing event until `copies` (at least one) exact copies have landed, waiting for the channel included."""
    copy_ms = view.costs.copy_ms
    if view.in_flight is None:
        return view.channel_wait_ms + copy_ms(copies)
    one_more = copy_ms(2) - copy_ms(1)
    return view.channel_wait_ms + view.in_flight.left * one_more + copy_ms(copies - 1)


def choose(view: RouteView, limit: int | None = None) -> Plan:
    """The best plan with at most `limit` copies (default: as many as the pool allows)."""
    return decide(view, limit) or choose_ref(view, limit)


def choose_ref(view: RouteView, limit: int | None = None) -> Plan:
    """`choose` in Python.

    One pass that stops as soon as the GPU path alone is no better than the best plan so far: costs never fall with more
    work, so no larger count can win. `Plan.estimates` holds the counts that were looked at, from 0.
    """
    here, missed = by_load(view)
    most = most_copies(view, len(missed))
    if limit is not None:
        most = min(most, limit)
    loads, resident_first = view.loads, view.resident_first
    cpu_ms, gpu_ms = view.costs.cpu_ms, view.costs.gpu_ms

    on_gpu, on_cpu = len(here), len(missed)
    gpu_load = sum([loads[e] for e in here])
    cpu_load = sum(loads.values()) - gpu_load
    cpu, alone = cpu_ms(on_cpu, cpu_load), gpu_ms(on_gpu, gpu_load)
    best, count = max(cpu, alone), 0
    estimates = [(cpu, alone)]
    for p in range(1, most + 1):
        load = loads[missed[p - 1]]
        cpu_load -= load
        gpu_load += load
        landed = transfer_ms(view, p)
        gpu = gpu_ms(on_gpu + p, gpu_load)
        if resident_first:
            gpu += (landed if landed > alone else alone) - alone
        else:
            gpu += landed
        cpu = cpu_ms(on_cpu - p, cpu_load)
        estimates.append((cpu, gpu))
        slower = cpu if cpu > gpu else gpu
        if slower < best - TIE_MS:
            best, count = slower, p
        if gpu >= best - TIE_MS:
            break
    return _plan(here, missed, count, estimates)


def unlimited(view: RouteView, plan: Plan) -> Plan:
    """The best plan if all missed experts had slots, from `choose`'s, which ran out of them; it keeps the estimates of that.

    By bisection: with more copies the CPU's path never gets longer and the GPU's never shorter.
    """
    here, missed, loads, costs = plan.gpu_resident, (*plan.exact_fetch, *plan.cpu), view.loads, view.costs
    landed = list(accumulate([loads[e] for e in missed], initial=0))  # loads of the first p
    gpu_load, total = sum([loads[e] for e in here]), len(missed)
    alone = costs.gpu_ms(len(here), gpu_load)

    def paths(p: int) -> tuple[float, float]:
        copied = transfer_ms(view, p) if p else 0.0
        gpu = costs.gpu_ms(len(here) + p, gpu_load + landed[p]) + (max(copied, alone) - alone if view.resident_first else copied)
        return costs.cpu_ms(total - p, landed[-1] - landed[p]), gpu

    low, high = 0, total  # the paths cross in between
    while low < high:
        middle = (low + high) // 2
        cpu, gpu = paths(middle)
        low, high = (low, middle) if gpu >= cpu else (middle + 1, high)
    count = low
    while count and max(paths(count - 1)) <= max(paths(count)) + TIE_MS:
        count -= 1
    return Plan(here, missed[:count], missed[count:], *paths(count), plan.estimates)


def spill(view: RouteView, plan: Plan) -> Plan:
    """`plan` with its lightest residents left to the CPU, as long as that shortens the longer path; only if it copies nothing.

    Where the CPU's hand-over is cheap, a pool with many hits makes the GPU the longer path, and more hits would make a
    layer slower.
    """
    if plan.exact_fetch or len(plan.gpu_resident) < 2 or plan.est_gpu_ms <= plan.est_cpu_ms:
        return plan
    loads, cpu_ms, gpu_ms = view.loads, view.costs.cpu_ms, view.costs.gpu_ms
    here, moved = list(plan.gpu_resident), []
    on_cpu, cpu_load = len(plan.cpu), sum([loads[e] for e in plan.cpu])
    gpu_load = sum([loads[e] for e in here])
    cpu, gpu = plan.est_cpu_ms, plan.est_gpu_ms
    while here:
        load = loads[here[-1]]
        next_cpu = cpu_ms(on_cpu + 1, cpu_load + load)
        next_gpu = gpu_ms(len(here) - 1, gpu_load - load)
        if max(next_cpu, next_gpu) >= max(cpu, gpu) - TIE_MS:
            break
        moved.append(here.pop())
        cpu, gpu, on_cpu, cpu_load, gpu_load = next_cpu, next_gpu, on_cpu + 1, cpu_load + load, gpu_load - load
    if not moved:
        return plan
    return Plan(tuple(here), (), (*plan.cpu, *moved), cpu, gpu, plan.estimates)


def split(view: RouteView, plan: Plan, among: Collection[int], limit: int | None = None) -> Plan:
    """`plan`, which `choose` made, with the pairs of one expert divided between GPU and CPU where that shortens the longer path.

    The expert is the heaviest of `among` that the GPU computes, and the GPU's part of it the smallest number of pairs that minimises the longer path:
    the balance point. A further copy (at most `limit` and what the pool allows) is worth it more often if the CPU keeps part of the expert, so the plan
    with one more copy is looked at too. A whole expert moved is never better than `choose`'s plan, so a split one is between two of its counts.
    """
    best, further = plan, plan.transfer_count + 1
    most = most_copies(view, plan.transfer_count + len(plan.cpu))
    plans = [plan]
    if further <= (most if limit is None else min(most, limit)):
        plans.append(at_count(view, plan.gpu_resident, (*plan.exact_fetch, *plan.cpu), further))
    for whole in plans:
        found = _split(view, whole, among)
        if found is not None and max(found.est_cpu_ms, found.est_gpu_ms) < max(best.est_cpu_ms, best.est_gpu_ms) - TIE_MS:
            best = replace(found, estimates=plan.estimates)
    return best


def _split(view: RouteView, plan: Plan, among: Collection[int]) -> Plan | None:
    loads, costs, here, copied = view.loads, view.costs, plan.gpu_resident, plan.exact_fetch
    experts = [e for e in (*here, *copied) if e in among and loads[e] > 1]
    if not experts:
        return None
    expert = min(experts, key=lambda e: (-loads[e], e))
    load, on_cpu = loads[expert], sum([loads[e] for e in plan.cpu])
    resident, arriving = sum([loads[e] for e in here]), sum([loads[e] for e in copied])
    landed = transfer_ms(view, len(copied)) if copied else 0.0

    def paths(pairs: int) -> tuple[float, float]:
        """With so many of the expert's pairs on the GPU."""
        left = load - pairs
        alone = costs.gpu_ms(len(here), resident - left * (expert in here))
        gpu = costs.gpu_ms(len(here) + len(copied), resident + arriving - left)
        gpu += max(landed, alone) - alone if view.resident_first else landed
        return costs.cpu_ms(len(plan.cpu) + 1, on_cpu + left), gpu

    low, high = 1, load - 1  # the paths cross in between: with more pairs the GPU's never gets shorter, the CPU's never longer
    while low < high:
        middle = (low + high) // 2
        cpu, gpu = paths(middle)
        low, high = (low, middle) if gpu >= cpu else (middle + 1, high)
    count = low
    while count > 1 and max(paths(count - 1)) <= max(paths(count)) + TIE_MS:
        count -= 1
    return replace(plan, split=((expert, count),), est_cpu_ms=paths(count)[0], est_gpu_ms=paths(count)[1])


def at_count(view: RouteView, here: Sequence[int], missed: Sequence[int], count: int) -> Plan:
    """The plan that copies exactly the first `count` of `missed`, with its estimate."""
    loads = view.loads
    gpu_load, arriving = sum(loads[e] for e in here), sum(loads[e] for e in missed[:count])
    alone = view.costs.gpu_ms(len(here), gpu_load)
    together = view.costs.gpu_ms(len(here) + count, gpu_load + arriving)
    landed = transfer_ms(view, count) if count else 0.0
    gpu = together + (max(landed, alone) - alone if view.resident_first else landed)
    cpu = view.costs.cpu_ms(len(missed) - count, sum(loads[e] for e in missed[count:]))
    return Plan(tuple(here), tuple(missed[:count]), tuple(missed[count:]), cpu, gpu)


def _plan(here: Sequence[int], missed: Sequence[int], count: int, estimates: list[tuple[float, float]]) -> Plan:
    cpu, gpu = estimates[count]
    return Plan(tuple(here), tuple(missed[:count]), tuple(missed[count:]), cpu, gpu, tuple(estimates))
