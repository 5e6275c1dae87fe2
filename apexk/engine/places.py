"""Which slots copies take: free ones first, then those of residents that the policy likes least and nobody needs.

`ahead` is the engine's: by layer, experts that were copied for its next routing event. Exact copies are asked for after
their layer's routing event, when no earlier kernel runs any more; copies ahead of need while the layer's own kernels do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from apexk.device.base import SpeculativeCopy
from apexk.policy.base import Policy
from apexk.policy.check import PlanError
from apexk.policy.evict import exact_candidates, prefetch_candidates
from apexk.policy.types import Prediction
from apexk.store.slots import Slots


class OwnPlaces:
    """Each layer has slots of its own."""

    def __init__(self, slots: Sequence[Slots], policy: Policy, rule: str, ahead: Mapping[int, Collection[int]]):
        self._slots, self._policy, self._rule, self._ahead = slots, policy, rule, ahead

    def routed(self) -> None:
        """A layer was routed, and what the channel did is booked: whatever is free now is read by nobody."""

    def available(self, layer: int, active: Collection[int]) -> int:
        """Slots that exact copies may take while the experts of `active` are spared."""
        slots = self._slots[layer]
        return slots.free_count + len(slots.resident().difference(active))

    def take(self, layer: int, experts: Sequence[int], active: Collection[int], step: int) -> list[int]:
        """Slots for exact copies of `experts`, emptied."""
        slots = self._slots[layer]
        free = slots.free()
        missing = len(experts) - len(free)
        if missing > 0:
            candidates = exact_candidates(slots.resident(), active, slots.loading())
            victims = self._policy.victims(layer, candidates, missing, step)
            require_victims(self._policy, victims, [e for e in victims if e in candidates], missing, missing)
            free += [slots.evict(e) for e in victims]
        return free[: len(experts)]

    def ahead(self, layer: int, active: Collection[int], predictions: Iterable[Prediction], step: int) -> list[SpeculativeCopy]:
        """What is copied ahead of need while `layer` runs `active`, each with its slot; `predictions` of the layers behind it."""
        return [copy for at, prediction in enumerate(predictions, layer + 1) for copy in self._for(at, prediction, step)]

    def _for(self, layer: int, prediction: Prediction, step: int) -> list[SpeculativeCopy]:
        slots = self._slots[layer]
        queue, free = self._wanted(layer, prediction), slots.free()
        # nothing of the layer is in use, its routing is still to come
        candidates = self._candidates(layer, prediction)
        incoming = queue[len(free) :][: len(candidates)]
        victims = self._policy.victims_for(layer, incoming, candidates, step) if incoming else ()
        require_victims(self._policy, victims, [e for e in victims if e in candidates], 0, len(incoming))
        places = free + [slots.slot_of(e) for e in victims]
        return [SpeculativeCopy(layer, expert, slot) for expert, slot in zip(queue, places, strict=False)]

    def _wanted(self, layer: int, prediction: Prediction) -> tuple[int, ...]:
        slots = self._slots[layer]
        there = slots.resident() | slots.loading()
        wanted = self._policy.on_predict(layer, prediction, there)
        if not there.isdisjoint(wanted) or len(set(wanted)) != len(wanted):
            raise PlanError(f"policy {self._policy.name!r} prefetches {tuple(wanted)} for layer {layer}; wanted different experts, none of those that are there: {sorted(there)}")
        return wanted

    def _candidates(self, layer: int, prediction: Prediction) -> set[int]:
        slots = self._slots[layer]
        return prefetch_candidates(slots.resident(), predicted=prediction.loads, prefetched=self._ahead.get(layer, ()), held=slots.loading(),
                                   in_use=(), rule=self._rule)


class SharedPlaces(OwnPlaces):
    """A slot may hold an expert of any layer."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._unread: set[int] = set()  # free slots that nobody has read since the layer was routed

    def routed(self) -> None:
        self._unread = set(self._slots[0].free())

    def available(self, layer: int, active: Collection[int]) -> int:
        return self._slots[0].free_count + sum(map(len, self._evictable(layer, active).values()))

    def take(self, layer: int, experts: Sequence[int], active: Collection[int], step: int) -> list[int]:
        free = self._slots[0].free()
        missing = len(experts) - len(free)
        if missing > 0:
            free += [self._slots[at].evict(e) for at, e in self._anywhere(layer, self._evictable(layer, active), missing, step, missing)]
        self._unread.difference_update(free[: len(experts)])
        return free[: len(experts)]

    def ahead(self, layer: int, active: Collection[int], predictions: Iterable[Prediction], step: int) -> list[SpeculativeCopy]:
        predictions = dict(enumerate(predictions, layer + 1))
        wanted = [(at, expert) for at, prediction in predictions.items() for expert in self._wanted(at, prediction)]
        places = sorted(self._unread.intersection(self._slots[0].free()))
        missing = len(wanted) - len(places)
        if missing > 0:
            candidates = self._evictable(layer, active)
            for at, prediction in predictions.items():
                candidates[at] = self._candidates(at, prediction)
            places += [self._slots[at].slot_of(e) for at, e in self._anywhere(layer, candidates, missing, step, 0)]
        return [SpeculativeCopy(at, expert, slot) for (at, expert), slot in zip(wanted, places, strict=False)]

    def _anywhere(self, layer: int, candidates: dict[int, Collection[int]], count: int, step: int, least: int) -> Sequence[tuple[int, int]]:
        victims = self._policy.victims_anywhere(layer, candidates, count, step)
        known = [one for one in victims if isinstance(one, tuple) and len(one) == 2 and one[1] in candidates.get(one[0], ())]
        require_victims(self._policy, victims, known, least, count)
        return victims

    def _evictable(self, layer: int, active: Collection[int]) -> dict[int, Collection[int]]:
        """By layer: residents that are neither `active` in this one nor copied for a layer that is still to come; the latter too
        where there would be no slot at all."""
        ahead = self._ahead
        found: dict[int, Collection[int]] = {
            at: slots.resident().difference(ahead[at]) if at in ahead else slots.resident() for at, slots in enumerate(self._slots)
        }
        found[layer] = exact_candidates(self._slots[layer].resident(), active, ())
        if ahead and not self._slots[0].free_count and not any(found.values()):  # waves would never end
            found = {at: slots.resident() if at != layer else found[layer] for at, slots in enumerate(self._slots)}
        return found


def require_victims(policy: Policy, victims: Sequence, known: Sequence, least: int, most: int) -> None:
    """Raises `PlanError` unless `victims` are from `least` to `most` different ones, all of them among those that were offered (`known`)."""
    if not least <= len(victims) <= most or len(known) != len(victims) or len(set(known)) != len(known):
        wanted = f"{most}" if least == most else f"up to {most}"
        raise PlanError(f"policy {policy.name!r} named {tuple(victims)} as victims; wanted {wanted} different ones of those that it was offered")
