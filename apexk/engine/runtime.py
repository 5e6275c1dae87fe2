"""What lives across layers and steps: slots, the policy's state, the clock of steps, and the running sums."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from apexk.device.base import At, CopyFailed, Device, Event, Rows, Running, SpeculativeCopy
from apexk.engine.observe import Observer
from apexk.engine.places import OwnPlaces, SharedPlaces, require_victims
from apexk.engine.totals import Totals
from apexk.policy.base import Policy
from apexk.policy.check import PlanError
from apexk.policy.types import InFlight, ModelShape, Prediction
from apexk.store.slots import slots_of
from apexk.timeline.writer import Timeline

log = logging.getLogger("apexk")


class Late(NamedTuple):
    """What a layer left to be added to the next one's output: the CPU's share of `experts`, in `rows`, there once `event` is done."""

    rows: Rows
    experts: tuple[int, ...]
    event: Event


@dataclass(frozen=True)
class EngineSettings:
    """Rules of the engine that are no policy's own; the defaults table of the design documents them."""

    resident_first: bool = True  # resident slots run at once instead of waiting for the exact copies
    in_flight: str = "finish"  # the running speculative copy at a routing event: "finish" (if needed or over half done) | "abort"
    prefetch_protects: str = "predicted"  # residents that a prefetch may not evict: "predicted" | "in_use" (see `prefetch_candidates`)
    part_tokens: int = 2048  # longer inputs are planned and copied for once, and computed in parts
    pool_scope: str | None = None  # whose the slots are: "layer" (each has its own) | "global" (any layer's) | None: the policy's choice


class Engine:
    """Runs the MoE layers of one model on one device under one policy. Layers of a step come in order."""

    def __init__(self, shape: ModelShape, capacity: int, device: Device, policy: Policy, settings: EngineSettings, timeline: Timeline,
                 bytes_per_expert: int):
        self.shape, self.capacity, self.device, self.policy = shape, capacity, device, policy
        self.settings, self.timeline, self.bytes_per_expert = settings, timeline, bytes_per_expert
        self.resident_first = settings.resident_first if policy.resident_first is None else policy.resident_first
        self.shared = policy.scope(settings.pool_scope) == "global"
        self.slot_count = capacity + policy.extra_slots(capacity)
        self.totals = {"prefill": Totals(), "decode": Totals()}
        self.recorder: Callable | None = None  # called with (at, rows, routers) at each routing event
        self.observer = Observer(device, policy, self.totals)
        #: held by whoever runs a layer or ends the engine: threads take turns, layer by layer. A signal handler may end it
        self.lock = threading.RLock()
        self._step, self._layer = -1, shape.layers
        self.restart()

    def enter(self, layer: int, phase: str) -> At:
        """The next layer begins. A layer at or before the last one starts a new step (a new forward pass)."""
        if not self._intact:
            self.restart()
        if layer <= self._layer:
            self._step += 1
        if layer != self._layer + 1:  # what was deferred by a layer that this one does not follow is nobody's
            self.late = None
        self._layer = layer
        self._intact = False
        return At(self._step, layer, phase)

    def leave(self) -> None:
        """The layer is joined, and what its slots hold is known."""
        self._intact = True

    def settle_copies(self, layer: int) -> None:
        """Copies of earlier steps that have landed by now become resident; where any layer may evict them, those of all layers."""
        for slots in self.slots if self.shared else (self.slots[layer],):
            slots.settle(self.device.done)

    def settle_speculation(self, at: At, loads: dict[int, int]) -> InFlight | None:
        """Stops speculation at a routing event and books what it did.

        Returns the running copy if this layer needs it and the policy waits for it; its slot is then `loading`.
        """
        # what is queued by predictions is decided anew in this layer, or was for a pass that went no further: nothing may be asked for
        # twice, or into a slot that another layer has by now. What was asked for after a step goes on, but for layers predicted here
        policy = self.policy
        through = at.layer + (policy.look_ahead if policy.speculates else 0) if policy.posts else self.shape.layers
        stopped = self.device.stop_speculation(at, through)
        for copy in stopped.failed:
            self._book(copy, None)
            self.slots[copy.layer].abandon(copy.expert)
            self._count(at, used=False, abandoned=True)
        for copy, event in stopped.landed:
            self._book(copy, event)
            self.slots[copy.layer].land(copy.expert)
            self._count(at, used=_needed(copy, at, loads))
            if copy.layer > at.layer:
                self._ahead.setdefault(copy.layer, []).append(copy.expert)
        if self._ahead:
            self.totals[at.phase].used += sum(e in loads for e in self._ahead.pop(at.layer, ()))
        return self._settle_running(at, loads, stopped.running) if stopped.running else None

    def speculate(self, at: At, active: Collection[int], predictions: Sequence[Prediction]) -> None:
        """Queues the predicted experts of the layers that follow, nearest first, each with the slot it will take, while this one
        runs `active`."""
        for layer in range(at.layer + 1, at.layer + 1 + len(predictions)):
            self.settle_copies(layer)
        copies = self.places.ahead(at.layer, active, predictions, at.step)
        if copies:
            self.device.speculate(at, copies)

    def post(self, at: At, after: tuple[Event, ...]) -> None:
        """The step is over: queues what the policy wants copied before its layer comes again."""
        wanted: dict[int, list[int]] = {}
        for layer, expert in self.policy.on_step_done(at.step):
            wanted.setdefault(layer, []).append(expert)
        copies = []
        for layer in sorted(wanted):
            self.settle_copies(layer)
            slots = self.slots[layer]
            resident, loading = slots.resident(), slots.loading()
            queue = [e for e in wanted[layer] if e not in resident and e not in loading]
            free = slots.free()
            incoming = queue[len(free) :][: len(resident)]
            victims = self.policy.victims_for(layer, incoming, set(resident), at.step + 1) if incoming else ()
            require_victims(self.policy, victims, [e for e in victims if e in resident], 0, len(incoming))
            places = free + [slots.slot_of(e) for e in victims]
            copies += [SpeculativeCopy(layer, expert, slot) for expert, slot in zip(queue, places, strict=False)]
        if copies and self.policy.waits_for_posts:
            self._copy_and_wait(at, copies, after)
        elif copies:
            self.device.speculate(at, copies, after)

    def _copy_and_wait(self, at: At, copies: list[SpeculativeCopy], after: tuple[Event, ...]) -> None:
        totals = self.totals[at.phase]
        for copy in copies:
            (event,) = self.device.copy_experts(At(at.step, copy.layer, at.phase), {copy.expert: copy.slot}, after)
            if isinstance(event, CopyFailed):
                log.warning("layer %d, after step %d: expert %d was not copied: %s", copy.layer, at.step, copy.expert, event)
                self._book(copy, None)
                self.slots[copy.layer].abandon(copy.expert)
                continue
            self._book(copy, event)
            totals.exact += 1
            totals.bytes += self.bytes_per_expert
        self.device.synchronize()
        for copy in copies:
            if copy.expert in self.slots[copy.layer].loading():
                self.slots[copy.layer].land(copy.expert)

    def _settle_running(self, at: At, loads: dict[int, int], running: Running) -> InFlight | None:
        copy, needed = running.copy, _needed(running.copy, at, loads)
        if self.settings.in_flight == "abort" or not (needed or running.left < 0.5):
            self.device.abandon(at, running)
            self._book(copy, None)
            self.slots[copy.layer].abandon(copy.expert)
            self._count(at, used=False, abandoned=True)
            return None
        self._book(copy, self.device.keep(at, running))
        self._count(at, used=False)  # `layer.submit` counts it as used if the plan takes it
        if copy.layer > at.layer:
            self._ahead.setdefault(copy.layer, []).append(copy.expert)
        return InFlight(copy.expert, running.left) if needed and self.policy.waits_in_flight else None

    def _count(self, at: At, used: bool, abandoned: bool = False) -> None:
        totals = self.totals[at.phase]
        totals.speculative += 1
        totals.used += used
        totals.abandoned += abandoned
        totals.bytes += self.bytes_per_expert

    def _book(self, copy: SpeculativeCopy, event: Event | None) -> None:
        """A speculative copy was begun: whatever its slot held is gone."""
        slots = self.slots[copy.layer]
        held = slots[copy.slot]
        if held.expert is not None:
            self.slots[held.layer].evict(held.expert)
        slots.begin(copy.expert, copy.slot, event)

    def restart(self) -> None:
        """Fills the pool with the policy's initial residents: at the start, after an interrupted layer, and when weights changed."""
        self._intact = False  # until the end: a restart can be interrupted too
        self.device.stop_speculation(At(max(self._step, 0), self.shape.layers, "prefill"), self.shape.layers)
        self.device.synchronize()  # an interrupted layer's kernels may still read the slots that are filled below
        self._layer = self.shape.layers
        self.late: Late | None = None
        self._ahead: dict[int, list[int]] = {}  # by layer: landed since its last routing event, or kept, for its next one
        self.observer.forget()
        self.slots = slots_of(self.shape.layers, self.slot_count, self.shared)
        self.places = (SharedPlaces if self.shared else OwnPlaces)(self.slots, self.policy, self.settings.prefetch_protects, self._ahead)
        for layer, slots in enumerate(self.slots):
            first = self.policy.initial(layer)
            if len(first) > slots.free_count or len(set(first)) != len(first) or not all(0 <= e < self.shape.experts for e in first):
                raise PlanError(f"policy {self.policy.name!r} starts layer {layer} with {len(first)} residents, {first}; wanted different ones of "
                                f"{self.shape.experts} experts, for {slots.free_count} free slots")
            for slot, expert in zip(slots.free()[: len(first)], first, strict=True):
                self.device.load_initial(layer, expert, slot)
                slots.begin(expert, slot, None)
                slots.land(expert)
        self._intact = True


def _needed(copy: SpeculativeCopy, at: At, loads: dict[int, int]) -> bool:
    return copy.layer == at.layer and copy.expert in loads
