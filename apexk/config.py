"""`ApexConfig`: what a user chooses, and how each setting's value is found: user > hardware file > default."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from apexk.arguments import MOST
from apexk.hardware import OVERRIDES, Hardware, load
from apexk.policy import registry
from apexk.policy.base import SCOPES
from apexk.policy.evict import RULES
from apexk.policy.types import PolicyOptions
from apexk.store.capacity import Capacity, Room, parse, resolve

DEVICES = ("virtual", "cpu", "cuda")
TRANSFERS = ("copy_engine", "sm_gather")
PAYLOADS = ("plain", "int8", "int4")
DENSE = ("kernels", "torch")
#: settings that the user, then the hardware file, may set; the design's defaults table says why these values
DEFAULTS = {
    "cost": "affine",
    "rate_ema": 0.2,
    "forgetting": 0.995,
    "utility_decay": 0.5,
    "evict": None,
    "resident_first": True,
    "in_flight": "finish",
    "prefetch_protects": "predicted",
    "pool_scope": None,
    "gpus": 1,
}


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: "user", "hardware file NAME" or "default"."""

    value: object
    source: str


@dataclass(frozen=True)
class ApexConfig:
    """How a model's experts are run.

    policy: which expert runs where; `apexk.policy.names()` lists them; also `name(key=value)` and `module:Class`.
    pool: expert slots on the GPU: a number for each layer, 0..experts; "8GiB" for all of them; "0.5" of the free device memory;
        None or "auto": what fits beside the model, a KV cache of `context_tokens` and activations, on a modelled device a
        quarter of the experts. `handle.info()` has the arithmetic.
    context_tokens: tokens of KV cache (all sequences together) that an automatic pool leaves room for.
    device: "virtual" (CPU tensors on a modelled clock) | "cpu" (no GPU: no pool, every expert in the CPU kernels, real clock) |
        "cuda" (torch's current device: everything but the experts moves there).
    transfer: of exact copies on a GPU: "copy_engine" | "sm_gather" (a kernel reads pinned host memory).
    payload: what a copy moves: "plain", the weights, or codes of fewer bits that the GPU dequantises, "int8" | "int4": lossy, on a
        virtual device only. The CPU computes from the plain weights.
    hardware: name or path of the hardware file that a virtual device is timed by and cost models start from.
    arithmetic: the virtual GPU half's, "reference" (of the Triton kernels) or "same" (the CPU kernels on both halves:
        results are then bitwise independent of policy and pool, and with `dense="torch"`, which "same" implies, the same on
        device "cpu").
    dense: with device "cpu" linear layers of bf16 or fp16 outside the experts: "kernels" (the CPU kernels: sums in another order than
        torch's) | "torch" (also where a gradient may be wanted, and under autocast). float32 layers are left to torch.
    part_tokens: a longer input is planned and copied for once and computed in parts of this many tokens, which bounds the memory of its rows.
    threads: of the CPU kernels; None: as many as this process may use.
    timeline: path of the `timeline.jsonl` to write; None keeps none.
    popularity: `[layers][experts]` activation counts on a calibration text, for the first residents; None: evenly spread.
    seed: of that spread.
    The rest is None where the hardware file's value or the default is wanted:
    cost: "affine" | "rates"; rate_ema, forgetting: of the cost models; utility_decay: per step; evict: rule of `apexk.policy.evict`, None: the policy's own;
    resident_first: resident experts run before the copies land; in_flight: "finish" | "abort" the prefetch that runs at a
    routing event; prefetch_protects: "predicted" | "in_use" residents are safe from a prefetch;
    pool_scope: "layer" (each layer has `pool` slots of its own) | "global" (all slots are for any layer), None: the policy's own;
    gpus: modelled by `apexk simulate` (see `apexk.sim.gpus`); a swapped model has one.
    """

    policy: str = "apex"
    pool: int | float | str | None = None
    context_tokens: int = 32_768
    device: str = "virtual"
    transfer: str = "copy_engine"
    payload: str = "plain"
    hardware: str | Path = "a6000-paper"
    arithmetic: str = "reference"
    dense: str = "kernels"
    part_tokens: int = 2048
    threads: int | None = None
    timeline: str | Path | None = None
    popularity: Sequence[Sequence[float]] | None = None
    seed: int = 0
    cost: str | None = None
    rate_ema: float | None = None
    forgetting: float | None = None
    utility_decay: float | None = None
    evict: str | None = None
    resident_first: bool | None = None
    in_flight: str | None = None
    prefetch_protects: str | None = None
    pool_scope: str | None = None
    gpus: int | None = None

    def __post_init__(self):
        for name, kinds in (("policy", str), ("hardware", (str, os.PathLike)), ("timeline", (str, os.PathLike, type(None)))):
            if not isinstance(getattr(self, name), kinds):
                raise TypeError(f"{name} is {getattr(self, name)!r}; wanted a {'name' if kinds is str else 'path'}")
        if self.pool_scope not in (None, *SCOPES):
            raise ValueError(f"pool_scope is {self.pool_scope!r}; there are {', '.join(SCOPES)}")
        policy = registry.get(self.policy)
        policy.scope(self.pool_scope)
        for rule in (self.evict, policy.options.evict):
            if rule is not None and rule not in RULES:
                raise ValueError(f"evict is {rule!r}; there are {', '.join(RULES)}")
        load(self.hardware)  # refuses one that is not there
        if policy.defers and self.device == "cuda":
            raise ValueError(f"policy {self.policy!r} defers experts by a layer, which device 'cuda' cannot: leave defer out, or take device 'virtual' or 'cpu'")
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; there are {', '.join(DEVICES)}")
        if self.arithmetic not in ("reference", "same"):
            raise ValueError(f"arithmetic is {self.arithmetic!r}; there are 'reference' and 'same'")
        if self.transfer not in TRANSFERS:
            raise ValueError(f"transfer is {self.transfer!r}; there are {', '.join(TRANSFERS)}")
        if self.transfer != TRANSFERS[0] and self.device != "cuda":
            raise ValueError(f"transfer is {self.transfer!r}, but device {self.device!r} has no GPU that could: leave it out")
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload is {self.payload!r}; there are {', '.join(PAYLOADS)}")
        if self.payload != PAYLOADS[0] and self.device != "virtual":
            why = "has no expert slots to fill" if self.device == "cpu" else "copies plain weights only"
            raise ValueError(f"payload is {self.payload!r}, but device {self.device!r} {why}: leave it out, or take device 'virtual'")
        if self.dense not in DENSE:
            raise ValueError(f"dense is {self.dense!r}; there are {', '.join(DENSE)}")
        if self.dense != DENSE[0] and self.device != "cpu":
            raise ValueError(f"dense is {self.dense!r}, as it always is with device {self.device!r}: leave it out, or take device 'cpu'")
        parse(self.pool)
        for name, lowest in (("threads", 1), ("seed", 0), ("part_tokens", 1), ("context_tokens", 1), ("gpus", 1)):
            value = getattr(self, name)
            if (value is not None or name not in ("threads", "gpus")) and (type(value) is not int or not lowest <= value <= MOST):
                raise ValueError(f"{name} is {value!r}; wanted a whole number from {lowest} to {MOST}")
        for name, kind in OVERRIDES.items():
            value = getattr(self, name)
            if isinstance(kind, tuple) and value not in (None, *kind):
                raise ValueError(f"{name} is {value!r}; there are {', '.join(kind)}")
            if kind is bool and value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False")
        if self.popularity is not None and not _are_counts(self.popularity):
            raise ValueError("popularity holds what is no count; wanted [layers][experts], as many experts in each, of finite numbers >= 0")
        given = {f.name: getattr(self, f.name) for f in fields(PolicyOptions)}
        PolicyOptions(**{name: value for name, value in given.items() if value is not None})  # refuses what is out of range

    def slots(self, experts: int) -> int:
        """Pool slots per layer for a model of `experts` experts a layer, where that depends on nothing else."""
        return self.capacity(1, experts, 1).slots

    def capacity(self, layers: int, experts: int, slot_bytes: int, extra: Callable[[int], int] = lambda slots: 0, room: Room | None = None) -> Capacity:
        """Slots per layer and their arithmetic; see `apexk.store.capacity.resolve`."""
        size = parse(self.pool)
        if self.device == "cpu":
            if size.slots or size.bytes or size.share:
                raise ValueError(f"pool is {self.pool}, but device 'cpu' has no expert slots: leave it out or say 0")
            if extra(0):
                raise ValueError(f"policy {self.policy!r} copies experts into {extra(0)} slots of its own, but device 'cpu' has no expert slots: "
                                 "take a policy without, such as 'apex', or device 'virtual'")
            return Capacity(0, "device 'cpu' has no expert slots")
        return resolve(size, layers, experts, slot_bytes, extra, room)

    def settings(self, hardware: Hardware) -> dict[str, Setting]:
        """Every setting of `DEFAULTS` with its value and source."""
        found = {}
        for name, default in DEFAULTS.items():
            if getattr(self, name) is not None:
                found[name] = Setting(getattr(self, name), "user")
            elif name in hardware.overrides:
                found[name] = Setting(hardware.overrides[name], f"hardware file {hardware.name}")
            else:
                found[name] = Setting(default, "default")
        return found


def policy_options(settings: dict[str, Setting]) -> PolicyOptions:
    """The part of the settings that the policy reads."""
    return PolicyOptions(**{f.name: settings[f.name].value for f in fields(PolicyOptions)})


def _are_counts(popularity: Sequence[Sequence[float]]) -> bool:
    try:
        numbers = all(0 <= count < math.inf and not isinstance(count, bool) for row in popularity for count in row)
        return numbers and len({len(row) for row in popularity}) == 1 and len(popularity[0]) > 0
    except TypeError:
        return False
