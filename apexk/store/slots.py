"""Which expert is in which slot: states only, no tensors.

A slot's life: free -> loading (its copy runs) -> ready (resident) -> free. Residency changes when a copy has landed, not
when it is asked for. A slot carries the event of its copy while that runs, for its readers. Copies into one slot need no
event: the channel runs them in order; nor does a copy need one of the slot's readers (see `Device.read_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Slot:
    layer: int = -1  # of the expert
    expert: int | None = None
    written: Any = None  # event: the copy into this slot has landed; None once that is known


class Slots:
    """Slots with experts of one layer. Breaking the life cycle raises RuntimeError: that is a fault of the engine, never of a user.

    `table` holds every slot of the pool, `free` the numbers of those that this layer may fill: a set of its own, or one that
    layers share.
    """

    def __init__(self, layer: int, table: Sequence[Slot], free: set[int]):
        self.layer, self.slots, self._free = layer, table, free
        self._of: dict[int, int] = {}
        self._loading: set[int] = set()
        self._resident: frozenset[int] | None = frozenset()  # None: to be made again

    def resident(self) -> frozenset[int]:
        """Experts whose copy has landed."""
        if self._resident is None:
            self._resident = frozenset(self._of.keys() - self._loading) if self._loading else frozenset(self._of)
        return self._resident

    def loading(self) -> frozenset[int]:
        return frozenset(self._loading)

    def free(self) -> list[int]:
        return sorted(self._free)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def slot_of(self, expert: int) -> int:
        return self._of[expert]

    def places(self, experts: Sequence[int]) -> dict[int, int]:
        """expert -> slot."""
        return dict(zip(experts, map(self._of.__getitem__, experts), strict=True))

    def writing(self, experts: Iterable[int]) -> list[Any]:
        """The events of those copies of `experts` that have not been seen to land."""
        loading = self._loading.intersection(experts)
        return [self.slots[self._of[e]].written for e in experts if e in loading] if loading else []

    def __getitem__(self, slot: int) -> Slot:
        return self.slots[slot]

    def evict(self, expert: int) -> int:
        """Takes a resident expert's slot away; returns it, free."""
        slot = self._of.get(expert)
        if slot is None or expert in self._loading:
            raise RuntimeError(f"layer {self.layer}: expert {expert} cannot be evicted: {self._say(expert)}")
        self._resident = None
        del self._of[expert]
        self.slots[slot].expert = None
        self._free.add(slot)
        return slot

    def begin(self, expert: int, slot: int, written: Any) -> None:
        """A copy of `expert` into the free `slot` has been issued; it has landed when `written` is done."""
        if expert in self._of:
            raise RuntimeError(f"layer {self.layer}: expert {expert} cannot be loaded: {self._say(expert)}")
        state = self.slots[slot]
        if state.expert is not None:
            raise RuntimeError(f"layer {self.layer}: slot {slot} still holds expert {state.expert} of layer {state.layer}")
        if slot not in self._free:
            raise RuntimeError(f"layer {self.layer}: slot {slot} belongs to another layer")
        self._of[expert] = slot
        self._loading.add(expert)
        self._free.remove(slot)
        state.layer, state.expert, state.written = self.layer, expert, written

    def land(self, expert: int) -> None:
        """The copy of `expert` is known to be done: it is resident, and nobody has to wait for it any more."""
        if expert not in self._loading:
            raise RuntimeError(f"layer {self.layer}: expert {expert} has no copy to land: {self._say(expert)}")
        self._resident = None
        self._loading.remove(expert)
        self.slots[self._of[expert]].written = None

    def settle(self, done: Callable[[Any], bool]) -> None:
        """Lands every copy whose event is `done`."""
        slots, of = self.slots, self._of
        for expert in [e for e in self._loading if done(slots[of[e]].written)]:
            self.land(expert)

    def abandon(self, expert: int) -> int:
        """The copy of `expert` was stopped or failed: its slot is free and holds nothing usable."""
        if expert not in self._loading:
            raise RuntimeError(f"layer {self.layer}: expert {expert} has no copy to abandon: {self._say(expert)}")
        slot = self._of.pop(expert)
        self._loading.discard(expert)
        self.slots[slot].expert = None
        self._free.add(slot)
        return slot

    def _say(self, expert: int) -> str:
        if expert not in self._of:
            return "it is in no slot"
        return f"it is {'loading into' if expert in self._loading else 'resident in'} slot {self._of[expert]}"


def slots_of(layers: int, count: int, shared: bool) -> list[Slots]:
    """Empty slots, `count` for each of `layers`: numbered layer by layer, or all of them for any layer (`shared`)."""
    table = [Slot() for _ in range(layers * count)]
    whole = set(range(len(table)))
    return [Slots(layer, table, whole if shared else set(range(layer * count, (layer + 1) * count))) for layer in range(layers)]
