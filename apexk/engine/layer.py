"""One MoE layer: the only code that turns a plan into work.

`submit` goes from the exact routing to everything launched; `join` merges. Between the two the caller may run what
overlaps (a shared expert). The order of operations is the design's: CPU experts start, exact copies start, resident
slots run, the next layer is predicted, arrived slots run, the channel turns to speculation, the halves are merged.
A long input is planned once, copied for once and run in parts (`Rows.parts`): what belongs to the first part is
launched by `submit`, the rest by `join`, so that the GPU's work on a part overlaps the CPU's on the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from apexk.device.base import LATE, At, CopyFailed, Event, Router, Rows, Ticket, wait_for
from apexk.engine.observe import LayerEvents
from apexk.engine.runtime import Engine, Late
from apexk.policy import PlanError, check_plan, decision_to_dict
from apexk.policy.types import Plan, Prediction, RouteView

MOST_PARTS = 128  # of one input; the CPU's queue holds the jobs of all

log = logging.getLogger("apexk")


@dataclass
class LayerTask:
    """A submitted layer: what `join` has to launch and to wait for."""

    at: At
    parts: list[Rows]  # the whole input where it is one
    view: RouteView
    plan: Plan
    in_waves: bool
    arrived: tuple[int, ...]  # copied for this layer; waves have none left
    failed: tuple[int, ...]  # whose copy failed: the CPU computes them
    events: LayerEvents
    hosts: list[Event | None]  # by part: its CPU rows are back
    ticket: Ticket | None  # of the prediction, which reads x; None once its result was taken
    predicted: Event | None
    before: Late | None  # of the layer before, to be added
    cpu: tuple[int, ...]  # experts that the CPU computes for this layer's own output, those of `failed` not counted


def submit(engine: Engine, layer: int, rows: Rows, phase: str, routers: Sequence[Router] = ()) -> LayerTask:
    """Launches one layer. `phase` is "prefill" or "decode"; `routers` are the following MoE layers' routing functions."""
    device, policy = engine.device, engine.policy
    at = engine.enter(layer, phase)
    device.begin_layer(at)
    rows.parts = rows.split(max(engine.settings.part_tokens, -(-rows.tokens // MOST_PARTS)))
    loads = device.read_back(at, rows)
    if engine.recorder is not None:
        engine.recorder(at, rows, routers)
    engine.settle_copies(layer)
    view = _view(engine, at, rows, loads)
    plan = policy.on_route(view)
    check_plan(view, plan, policy.waves, policy.name)
    _record_plan(engine, view, plan)

    unassigned = max(plan.estimates[0]) if plan.estimates else None
    estimated = None if plan.est_cpu_ms is None else max(plan.est_cpu_ms, plan.est_gpu_ms)
    events = LayerEvents(at, device.now_ms(), layer == engine.shape.layers - 1, rows.tokens, unassigned, estimated)
    in_waves = policy.waves and plan.transfer_count > (view.available if policy.keeps_fetched else engine.slots[layer].free_count)
    rows.loads = loads
    parts = [rows] if not rows.parts or in_waves and device.sums_in_order else rows.parts
    first = parts[0]
    late = _deferred(engine, layer, rows, plan)
    cpu = tuple(e for e in plan.cpu if e not in late) if late else plan.cpu
    if plan.split:
        _divide(engine, parts, plan)
        cpu += tuple(e for e, _ in plan.split)
    hosts = [_start_host(engine, events, first, cpu)]
    arrived, failed = ((), ()) if in_waves else _copy(engine, at, view, plan, events)
    if in_waves:
        # waves take slots again within the layer, so no part could come back to them: each wave runs all parts
        waves = parts if len(parts) == 1 else [part.in_waves() for part in parts]
        _launch_wave(engine, events, waves, plan.gpu_resident, "gpu.resident")
        ticket = _predict(engine, at, rows, routers)
        failed = _run_waves(engine, events, waves, view, plan)
        for part, wave in zip(parts, waves, strict=True):
            part.summed = wave.summed
    elif engine.resident_first:
        _launch(engine, events, first, plan.gpu_resident, "gpu.resident")
        ticket = _predict(engine, at, rows, routers)
        _launch(engine, events, first, arrived, "gpu.arrived")
    else:
        ticket = _predict(engine, at, rows, routers)
        _launch(engine, events, first, plan.gpu_resident + arrived, "gpu.arrived" if arrived else "gpu.resident")
    if failed:  # the lane is in order: the later event, where the part has tokens for them, stands for both
        hosts[0] = _start_host(engine, events, first, (), failed) or hosts[0]
    if len(parts) > 1:
        hosts.append(_start_host(engine, events, parts[1], cpu, failed))
    before, engine.late = engine.late, _defer(engine, at, rows, late) if late else None
    task = LayerTask(at, parts, view, plan, in_waves, arrived, failed, events, hosts, ticket, ticket.event if ticket else None, before, cpu)
    _speculate(engine, task)
    return task


def join(engine: Engine, task: LayerTask, out: torch.Tensor | None = None, shared: torch.Tensor | None = None) -> None:
    """Merges a submitted layer into `out [T, H]`, adding `shared`, and lets policy and sums learn from it."""
    events, parts, hosts, plan = task.events, task.parts, task.hosts, task.plan
    cpu, before = task.cpu, task.before
    if before is not None:
        parts[0].late = before.rows, before.experts
    withheld = frozenset(plan.cpu).difference(task.cpu)
    parts[0].withheld = bool(withheld)
    _speculate(engine, task)
    for number, part in enumerate(parts):
        if number + 1 < len(parts) and not task.in_waves:
            _launch(engine, events, parts[number + 1], plan.gpu_resident + task.arrived, "gpu.resident")
        # x may be written again once this layer is merged, so the last merge also waits for the prediction, which reads it
        after = wait_for(hosts[number], task.predicted if number + 1 == len(parts) else None, before.event if before is not None else None)
        rest = _of_part(part, cpu + task.failed) if part.summed else part.loads.keys() - withheld if withheld else part.loads
        events.combined = engine.device.combine(task.at, part, rest, part.of(out), part.of(shared), after)
        if number + 2 < len(parts):  # its buffer has been merged
            hosts.append(_start_host(engine, events, parts[number + 2], cpu, task.failed, wait_for(events.combined)))
    if not engine.policy.keeps_fetched:
        for expert in task.arrived:
            engine.slots[task.at.layer].land(expert)  # who takes its slot comes a step later
            engine.slots[task.at.layer].evict(expert)
    _count(engine, task, plan.cpu + task.failed, sum([task.view.loads[e] for e in withheld]))
    engine.policy.on_layer_done(task.at.layer, task.at.step, task.at.phase, task.view.loads)
    engine.observer.add(events)
    _speculate(engine, task)
    engine.leave()
    if events.last_of_step:
        engine.post(task.at, wait_for(events.combined))


def _view(engine: Engine, at: At, rows: Rows, loads: dict[int, int]) -> RouteView:
    in_flight = engine.settle_speculation(at, loads)
    engine.places.routed()
    slots = engine.slots[at.layer]
    landed = slots.resident()
    # copies asked for earlier that have not been seen to land: their readers wait for them, so they count as resident.
    # A policy that never waits for a copy has them missed instead
    waits = engine.policy.fetches or engine.policy.waits_in_flight
    coming = slots.loading().difference([in_flight.expert] if in_flight else ()) if waits else frozenset()
    memory = engine.policy.recall(at.layer, at.phase, loads)
    return RouteView(
        step=at.step, layer=at.layer, phase=at.phase, tokens=rows.tokens, loads=loads, resident=landed | coming if coming else landed,
        available=engine.places.available(at.layer, loads), costs=engine.policy.costs(at.phase), memory=memory,
        in_flight=in_flight, channel_wait_ms=0.0 if in_flight else engine.device.channel_wait_ms(), resident_first=engine.resident_first,
    )


def _divide(engine: Engine, parts: list[Rows], plan: Plan) -> None:
    """Gives each side its share of the split experts; of an input in parts, the GPU's pairs are those of the first tokens."""
    left = dict(plan.split)
    for part in parts:
        here = {e: min(n, part.loads[e]) for e, n in left.items() if e in part.loads}
        engine.device.divide(part, here)
        left |= {e: left[e] - n for e, n in here.items()}


def _start_host(engine: Engine, events: LayerEvents, part: Rows, experts: Sequence[int], failed: Sequence[int] = (),
                after: tuple[Event, ...] = ()) -> Event | None:
    """Queues the CPU's share of a part, that of `failed` too: experts that the GPU was to compute; None where it has none and an empty share
    costs nothing."""
    if part.shares is None:
        return _queue_host(engine, events, part, (*experts, *failed), after)
    gpu, cpu = part.shares
    queued = [_queue_host(engine, events, rows, chosen, after) for rows, chosen in ((cpu, experts), (gpu, failed)) if chosen]
    return next((event for event in reversed(queued) if event is not None), None)


def _queue_host(engine: Engine, events: LayerEvents, rows: Rows, experts: Sequence[int], after: tuple[Event, ...]) -> Event | None:
    device, loads = engine.device, rows.loads
    experts = _of_part(rows, experts)
    if not experts and not (device.host_runs_empty and engine.policy.uses_cpu):
        return None
    events.cpu_experts += len(experts)
    events.host = device.run_host(events.at, rows, experts, loads, after)
    return events.host


def _deferred(engine: Engine, layer: int, rows: Rows, plan: Plan) -> tuple[int, ...]:
    """Experts of the CPU's share that are computed one layer late: those that no token has above its `policy.defers` lowest weights.
    The last layer has no later one to add them to; an input in parts is long, and defers none."""
    if not engine.policy.defers or layer + 1 == engine.shape.layers or rows.parts:
        return ()
    places, protected = rows.best_places(), rows.topk - engine.policy.defers
    return tuple(e for e in plan.cpu if places[e] >= protected)


def _defer(engine: Engine, at: At, rows: Rows, experts: tuple[int, ...]) -> Late:
    """Queues them behind the layer's own share. Their buffer was last read by the merge of the layer before, which has ended: the layer is routed."""
    later = rows.deferred(LATE[at.layer % 2])
    return Late(later, experts, engine.device.run_host(at, later, experts, rows.loads))


def _copy(engine: Engine, at: At, view: RouteView, plan: Plan, events: LayerEvents) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Issues the exact copies; returns every expert that will have arrived, a running speculative copy included, and those
    whose copy failed: the CPU computes them."""
    fetch = plan.exact_fetch if view.in_flight is None else [e for e in plan.exact_fetch if e != view.in_flight.expert]
    failed = _issue(engine, events, fetch, view.loads.keys()) if fetch else ()
    return tuple([e for e in plan.exact_fetch if e not in failed]) if failed else plan.exact_fetch, failed


def _issue(engine: Engine, events: LayerEvents, fetch: Sequence[int], spared: Collection[int], after: tuple[Event, ...] = ()) -> tuple[int, ...]:
    """Takes slots for the copies of `fetch`, of no `spared` expert, and issues them; returns those that failed, whose slots
    stay free."""
    if not fetch:
        return ()
    at, slots, failed = events.at, engine.slots[events.at.layer], []
    places = dict(zip(fetch, engine.places.take(at.layer, fetch, spared, at.step), strict=True))
    newest = None
    for (expert, slot), event in zip(places.items(), engine.device.copy_experts(at, places, after), strict=True):
        if isinstance(event, CopyFailed):
            log.warning("layer %d, step %d: expert %d runs on the CPU, its copy failed: %s", at.layer, at.step, expert, event)
            failed.append(expert)
            continue
        slots.begin(expert, slot, event)
        if event is not newest:  # several copies may have one
            newest = event
            events.copies.append(event)
    events.copied += len(places) - len(failed)
    return tuple(failed)


def _run_waves(engine: Engine, events: LayerEvents, parts: list[Rows], view: RouteView, plan: Plan) -> tuple[int, ...]:
    """More copies than slots: as many as fit are copied and run, then their slots serve the next ones. Returns the experts
    whose copy failed.

    The first wave spares the active residents; they have been launched, so later waves may take their slots too, but for
    those that the policy holds. Policies that keep nothing use the free slots where there are some, and free them again.
    Raises `PlanError` where a wave finds no slot.
    """
    slots, keeps = engine.slots[events.at.layer], engine.policy.keeps_fetched
    waiting = [e for e in plan.exact_fetch if view.in_flight is None or e != view.in_flight.expert]
    landing = tuple(e for e in plan.exact_fetch if e not in waiting)  # a prefetch under way has its slot already
    spared, held, read, failed = frozenset(view.loads), engine.policy.holds(view), (), []
    while waiting or landing:
        room = (0 if keeps else slots.free_count) or _room(engine, events.at.layer, spared)
        if not room and not landing and spared is held:
            raise PlanError(f"policy {engine.policy.name!r}, layer {events.at.layer}, step {events.at.step}: {len(waiting)} copies are still to come in waves, and "
                            f"the {len(slots.resident())} residents are held: a plan in waves must leave them a slot")
        wave, waiting = waiting[:room], waiting[room:]
        lost = _issue(engine, events, wave, spared, read)
        failed += lost
        copied = [e for e in wave if e not in lost]
        _launch_wave(engine, events, parts, (*landing, *copied), "gpu.arrived")
        for expert in (*landing, *copied):
            slots.land(expert)  # whoever takes its slot in this layer waits for the kernel, and the kernel for the copy
            if not keeps:
                slots.evict(expert)
        landing, spared, read = (), held, wait_for(events.launches[-1][1] if events.launches else None)
    return tuple(failed)


def _room(engine: Engine, layer: int, spared: frozenset[int]) -> int:
    """Slots that a wave's copies may take."""
    room = engine.places.available(layer, spared)
    if not room:  # what is still on its way and not for this layer's plan may go as well: a copy into its slot follows it on the channel
        for slots in engine.slots if engine.shared else (engine.slots[layer],):
            for expert in slots.loading() - spared if slots.layer == layer else slots.loading():
                slots.land(expert)
        room = engine.places.available(layer, spared)
    return room


def _launch(engine: Engine, events: LayerEvents, rows: Rows, experts: tuple[int, ...], kind: str) -> None:
    """Runs slots once their copies are done."""
    if rows.shares is not None:
        rows = rows.shares[0]
    loads, experts = rows.loads, _of_part(rows, experts)
    if not experts:
        return
    slots = engine.slots[events.at.layer]
    places = slots.places(experts)
    after = wait_for(*slots.writing(experts))
    event = engine.device.run_slots(events.at, rows, places, loads, kind, after)
    events.launches.append((len(experts), event))


def _launch_wave(engine: Engine, events: LayerEvents, parts: list[Rows], experts: tuple[int, ...], kind: str) -> None:
    """Runs slots for every part of an input; the rows of one that is not whole become part of its sums."""
    for part in parts:
        _launch(engine, events, part, experts, kind)
        here = _of_part(part, experts)
        if here and part.buffer is not None:
            engine.device.accumulate(events.at, part, here)
            part.summed = True


def _of_part(rows: Rows, experts: Sequence[int]) -> Sequence[int]:
    """Those that a part of a long input has tokens for."""
    return experts if rows.buffer is None else [e for e in experts if e in rows.loads]


def _predict(engine: Engine, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket | None:
    known = routers if rows.x is not None else rows.predicted
    if not known or not engine.policy.speculates or engine.slot_count == 0 or at.layer + 1 >= engine.shape.layers:
        return None
    return engine.device.predict(at, rows, routers[: engine.policy.look_ahead])


def _speculate(engine: Engine, task: LayerTask) -> None:
    """Queues what was predicted, as soon as that is on the host: it is looked for while the layer is submitted and joined."""
    predicted = engine.device.take_prediction(task.ticket) if task.ticket is not None else None
    if predicted is not None:
        task.ticket = None
        engine.speculate(task.at, task.view.loads, [Prediction(*one) for one in predicted[: engine.policy.look_ahead]])


def _record_plan(engine: Engine, view: RouteView, plan: Plan) -> None:
    if not engine.timeline.active:
        return
    now = round(engine.device.now_ms() * 1e6)
    engine.timeline.add(
        step=view.step, layer=view.layer, phase=view.phase, kind="plan", lane="host", start_ns=now, end_ns=now, bytes=0,
        experts=sorted(view.loads), tokens=view.tokens, reads=[f"L{view.layer}.routing"], writes=[], modelled=engine.device.modelled,
        decision=decision_to_dict(engine.policy.name, view, plan),
    )


def _count(engine: Engine, task: LayerTask, cpu: tuple[int, ...], late_pairs: int) -> None:
    view, plan, events, copies = task.view, task.plan, task.events, task.events.copied
    loads = view.loads
    cpu_pairs = sum([loads[e] for e in cpu])
    shared = [loads[e] - n for e, n in plan.split if e not in task.failed] if plan.split else ()
    cpu_pairs += sum(shared)
    events.cpu_pairs, events.gpu_pairs = cpu_pairs - late_pairs, sum(loads.values()) - cpu_pairs
    totals = engine.totals[view.phase]
    totals.active += len(loads)
    totals.hits += len(view.resident.intersection(loads))
    totals.exact += copies
    totals.used += view.in_flight is not None and view.in_flight.expert in plan.exact_fetch
    totals.bytes += copies * engine.bytes_per_expert
    totals.failed_copies += len(task.failed)
    totals.cpu_experts += len(cpu) + len(shared)
    totals.cpu_pairs += cpu_pairs
