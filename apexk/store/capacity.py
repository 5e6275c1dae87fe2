"""How many expert slots a layer gets: a number, bytes, a share of the free memory, or what fits beside the rest of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
FORMS = "a number of slots per layer (12), bytes for all of them ('8GiB'), a share of the free device memory ('0.5'), or 'auto'"


@dataclass(frozen=True)
class PoolSize:
    """What was asked for: exactly one is not None, or none of them for the automatic choice."""

    slots: int | None = None
    bytes: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Room:
    """A device's free bytes, and what of them must stay free: a reason -> bytes."""

    free: int
    kept: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """Slots a layer, and how that number came about."""

    slots: int
    arithmetic: str


def parse(value: int | float | str | None) -> PoolSize:
    """Raises ValueError with the forms that there are."""
    if value is None or value == "auto":
        return PoolSize()
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return PoolSize(slots=value)
    if isinstance(value, str) and re.fullmatch(r"\d+", value):
        return PoolSize(slots=int(value))
    if isinstance(value, float) or isinstance(value, str) and re.fullmatch(r"\d*\.\d+", value):
        if 0 < float(value) <= 1:
            return PoolSize(share=float(value))
    elif isinstance(value, str) and (found := re.fullmatch(rf"(\d+(?:\.\d+)?) *({'|'.join(UNITS)})", value)):
        return PoolSize(bytes=int(float(found[1]) * UNITS[found[2]]))
    raise ValueError(f"pool is {value!r}; wanted {FORMS}")


def resolve(size: PoolSize, layers: int, experts: int, slot_bytes: int, extra: Callable[[int], int] = lambda slots: 0, room: Room | None = None) -> Capacity:
    """Slots a layer for a model of `layers` layers of `experts` experts, `slot_bytes` each. `extra(slots)` are slots a layer that
    the policy adds for itself. `room` is the device's, None where the device has no memory of its own (a modelled one).
    Raises ValueError with the numbers where what was asked for does not exist or fit."""

    def needed(slots: int) -> int:
        return layers * (slots + extra(slots)) * slot_bytes

    def most(budget: int) -> int:
        return max((s for s in range(experts + 1) if needed(s) <= budget), default=0)

    def fits(budget: int) -> str:
        return f"{_gib(budget)} / {layers} layers / {_mib(slot_bytes)} a slot = {most(budget)} slots a layer of {experts} experts"

    if size.slots is not None:
        if size.slots > experts:
            raise ValueError(f"pool is {size.slots} slots per layer, but a layer has {experts} experts: wanted 0..{experts}")
        text = f"{size.slots} slots a layer x {layers} layers x {_mib(slot_bytes)} = {_gib(needed(size.slots))}"
        if room is not None and needed(size.slots) > room.free:
            raise ValueError(f"the pool does not fit: {text}, but {_gib(room.free)} of device memory are free, enough for {most(room.free)} slots a layer")
        return Capacity(size.slots, text)
    if size.bytes is not None:
        if room is not None and size.bytes > room.free:
            raise ValueError(f"pool is {_gib(size.bytes)}, but {_gib(room.free)} of device memory are free")
        return Capacity(most(size.bytes), fits(size.bytes))
    if room is None:
        if size.share is not None:
            raise ValueError(f"pool is {size.share:g} of the free device memory, but this device is a modelled one and has none: "
                             "give slots per layer or bytes")
        return Capacity(max(1, experts // 4), f"a quarter of {experts} experts, at least one")
    if size.share is not None:
        budget = int(size.share * room.free)
        return Capacity(most(budget), f"{size.share:g} of {_gib(room.free)} free = {fits(budget)}")
    budget = room.free - sum(room.kept.values())
    kept = "".join(f" - {_gib(nbytes)} {reason}" for reason, nbytes in room.kept.items())
    if budget < needed(0) + layers * slot_bytes:
        return Capacity(0, f"{_gib(room.free)} free{kept} leaves {_gib(budget)}, less than one slot a layer ({_gib(layers * slot_bytes)}): "
                           "no pool, every expert runs on the CPU")
    return Capacity(most(budget), f"{_gib(room.free)} free{kept} = {fits(budget)}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
