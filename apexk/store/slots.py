"""Which expert is in which slot: states only, no tensors.

A slot's life: free -> loading (its copy runs) -> ready (resident) -> free. Residency changes when a copy has landed, not
when it is asked for. A slot carries the event of its copy while that runs, for its readers. Copies into one slot need no
event: the channel runs them in order; nor does a copy need one of the slot's readers (see `Device.read_back`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Slot:
    layer: int = -1  # of the expert
    expert: int | None = None
    loading: bool = False
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

    def places(self, experts: Iterable[int]) -> dict[int, int]:
        """expert -> slot."""
        of = self._of
        return {e: of[e] for e in experts}

    def writing(self, experts: Iterable[int]) -> list[Any]:
        """The events of those copies of `experts` that have not been seen to land."""
        return [self.slots[self._of[e]].written for e in experts if e in self._loading] if self._loading else []

    def __getitem__(self, slot: int) -> Slot:
        return self.slots[slot]

    def evict(self, expert: int) -> int:
        """Takes a resident expert's slot away; returns it, free."""
        slot = self._of.get(expert)
        if slot is None or self.slots[slot].loading:
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
        if self.slots[slot].expert is not None:
            raise RuntimeError(f"layer {self.layer}: slot {slot} still holds expert {self.slots[slot].expert} of layer {self.slots[slot].layer}")
        if slot not in self._free:
            raise RuntimeError(f"layer {self.layer}: slot {slot} belongs to another layer")
        self._of[expert] = slot
        self._loading.add(expert)
        self._free.remove(slot)
        state = self.slots[slot]
        state.layer, state.expert, state.loading, state.written = self.layer, expert, True, written

    def land(self, expert: int) -> None:
        """The copy of `expert` is known to be done: it is resident, and nobody has to wait for it any more."""
        if expert not in self._of or not self.slots[self._of[expert]].loading:
            raise RuntimeError(f"layer {self.layer}: expert {expert} has no copy to land: {self._say(expert)}")
        self._resident = None
        slot = self.slots[self._of[expert]]
        self._loading.discard(expert)
        slot.loading, slot.written = False, None

    def abandon(self, expert: int) -> int:
        """The copy of `expert` was stopped or failed: its slot is free and holds nothing usable."""
        if expert not in self._of or not self.slots[self._of[expert]].loading:
            raise RuntimeError(f"layer {self.layer}: expert {expert} has no copy to abandon: {self._say(expert)}")
        slot = self._of.pop(expert)
        self._loading.discard(expert)
        self.slots[slot].expert, self.slots[slot].loading = None, False
        self._free.add(slot)
        return slot

    def _say(self, expert: int) -> str:
        if expert not in self._of:
            return "it is in no slot"
        slot = self._of[expert]
        return f"it is {'loading into' if self.slots[slot].loading else 'resident in'} slot {slot}"


def slots_of(layers: int, count: int, shared: bool) -> list[Slots]:
    """Empty slots, `count` for each of `layers`: numbered layer by layer, or all of them for any layer (`shared`)."""
    table = [Slot() for _ in range(layers * count)]
    whole = set(range(len(table)))
    return [Slots(layer, table, whole if shared else set(range(layer * count, (layer + 1) * count))) for layer in range(layers)]
