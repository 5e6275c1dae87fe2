"""Batch thresholds of llama.cpp and ik_llama.cpp: a large batch copies what it needs, a small one computes on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import DEFAULTS, Policy
from .fiddler import SCRATCH_SLOTS
from .scan import by_load
from .types import CostPrior, ModelShape, Phase, Plan, PolicyOptions, RouteView

MIN_BATCH = 32


class LlamaCpp(Policy):
    """From 32 tokens on every missed expert is copied, through scratch slots, and not kept."""

    name = "llamacpp_static32"
    source = "llama.cpp, operator offload"
    speculates = False
    fetches = True
    waits_in_flight = False
    waves = True
    keeps_fetched = False

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS

    def copies(self, view: RouteView) -> bool:
        return view.tokens >= MIN_BATCH

    def on_route(self, view: RouteView) -> Plan:
        here, missed = by_load(view)
        if self.copies(view):
            return Plan(tuple(here), tuple(missed), ())
        return Plan(tuple(here), (), tuple(missed))


class IkLlamaCpp(LlamaCpp):
    """The same from 32 tokens an expert on: tokens * top-k >= 32 * experts."""

    name = "ik_static"
    source = "ik_llama.cpp, operator offload by ratio"

    def recall(self, layer: int, phase: Phase, loads: Mapping[int, int]) -> dict:
        return {"experts": self.shape.experts, "topk": self.shape.topk}

    def copies(self, view: RouteView) -> bool:
        return view.tokens * view.memory["topk"] >= MIN_BATCH * view.memory["experts"]


class CpuLayers(LlamaCpp):
    """The experts of the first `layers` layers live on the CPU, all others on the GPU: whole layers, in the slots of all together.

    Without `layers`, as few as the slots allow. Large batches copy as `llamacpp_static32` does, through scratch slots.
    """

    name = "n_cpu_moe"
    source = "llama.cpp, --n-cpu-moe"
    pool_scopes = ("global",)

    def __init__(self, options: PolicyOptions = DEFAULTS, layers: int | None = None):
        if layers is not None and (type(layers) is not int or layers < 0):
            raise ValueError(f"n_cpu_moe: layers is {layers!r}; wanted a whole number >= 0")
        super().__init__(options)
        self.layers = layers

    def start(self, shape: ModelShape, capacity: int, prior: CostPrior, popularity: Sequence[Sequence[float]] | None = None, seed: int = 0) -> None:
        super().start(shape, capacity, prior, popularity, seed)
        fewest = shape.layers - self.capacity * shape.layers // shape.experts
        if self.layers is not None and not fewest <= self.layers <= shape.layers:
            raise ValueError(f"n_cpu_moe: layers is {self.layers}; {shape.layers} layers x {self.capacity} slots hold the {shape.experts} experts of "
                             f"{shape.layers - fewest} layers: wanted {fewest}..{shape.layers}")
        self.on_cpu = fewest if self.layers is None else self.layers

    def initial(self, layer: int) -> tuple[int, ...]:
        return tuple(range(self.shape.experts)) if layer >= self.on_cpu else ()
