"""FlexGen and MoE-Lightning: weights stream through the GPU, layer by layer, in fixed order; no expert runs on the CPU.

Both are made for large batches, where every expert of a layer has tokens and the whole layer is moved; here an expert
without a token is not. What the systems decide beside that, batch sizes and what lies where, their planners do
(`apexk.planners`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .arguments import require_number
from .base import DEFAULTS, Policy
from .fiddler import SCRATCH_SLOTS
from .types import ModelShape, Plan, PolicyOptions, Prediction, RouteView


class FlexGen(Policy):
    """The lowest ids of each layer stay on the GPU, as many as there are slots; the rest is copied in order of id, through a
    few slots, and not kept."""

    name = "flexgen"
    source = "FlexGen, public code; experts without a token stay where they are"
    speculates = False
    fetches = True
    waits_in_flight = False
    uses_cpu = False
    waves = True
    keeps_fetched = False

    def extra_slots(self, capacity: int) -> int:
        return SCRATCH_SLOTS

    def initial(self, layer: int) -> tuple[int, ...]:
        return tuple(range(self.capacity))

    def on_route(self, view: RouteView) -> Plan:
        ids = sorted(view.loads)
        return Plan(tuple(e for e in ids if e in view.resident), tuple(e for e in ids if e not in view.resident), ())


class MoELightning(Policy):
    """Layers stream through slots of all layers together, a page an expert: while one layer runs, the next one's missing experts are
    copied in order of id, asked for by nobody; a page that the routing asks for before it has come is copied at once.

    A share `weights` of each layer's experts, the lowest ids, stays; without it, as many as leave room for the rest of two layers,
    the one that runs and the one that comes. Pages replace those of the layer that has run last, and so on backwards: they are needed again last.

    Not expressed: the CPU's attention and the activation copies between the pages (the engine is given a layer's attention as one
    time, and no micro-batches: `apexk.planners.moe_lightning` chooses them, `apexk.hf.coalesce` runs attention by micro-batch), and that pages whose expert
    gets no token are moved to the end of the layer: what has not begun when the layer is routed is dropped, then only what is needed is copied.
    """

    name = "moe_lightning"
    source = "MoE-Lightning, paper's summary; without CPU attention and micro-batches"
    speculates = True
    fetches = True
    waits_in_flight = True
    uses_cpu = False
    waves = True
    pool_scopes = ("global",)

    def __init__(self, options: PolicyOptions = DEFAULTS, weights: float | None = None):
        if weights is not None:
            require_number("moe_lightning", "weights", weights, 0, 1, "a share of the experts")
        super().__init__(options)
        self.weights = weights

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        self.stay = pinned(shape, self.capacity) if self.weights is None else round(self.weights * shape.experts)
        if self.stay > self.capacity:
            raise ValueError(f"moe_lightning: weights {self.weights:g} of {shape.experts} experts are {self.stay}, and there are {self.capacity} slots a layer")
        self.paged: int | None = None  # the layer whose pages are being queued

    def extra_slots(self, capacity: int) -> int:
        return max(0, SCRATCH_SLOTS - capacity)

    def initial(self, layer: int) -> tuple[int, ...]:
        return tuple(range(self.stay))

    def on_route(self, view: RouteView) -> Plan:
        self.paged = None
        ids = sorted(view.loads)
        return Plan(tuple(e for e in ids if e in view.resident), tuple(e for e in ids if e not in view.resident), ())

    def on_predict(self, layer_next: int, prediction: Prediction, resident: frozenset[int]) -> tuple[int, ...]:
        self.paged = layer_next
        return tuple(e for e in range(self.shape.experts) if e not in resident)

    def victims_anywhere(self, layer: int, candidates: Mapping[int, Collection[int]], count: int, step: int) -> tuple[tuple[int, int], ...]:
        """Needed again last first; none that stays, and none of the layer whose pages come, while there is any other."""

        def order(one: tuple[int, int]):
            at, expert = one
            return expert < self.stay, (layer - at) % self.shape.layers, expert

        every = sorted(((at, e) for at, experts in candidates.items() for e in experts), key=order)
        if self.paged is not None:
            every = [(at, e) for at, e in every if at != self.paged and e >= self.stay]
        return tuple(every[:count])


def pinned(shape: ModelShape, capacity: int) -> int:
    """The most experts a layer that can stay beside the rest of two layers under way, in `capacity` slots a layer: the largest w with
    w * L + 2 * (E - w) <= capacity * L."""
    under_way = min(2, shape.layers)
    if capacity >= shape.experts:
        return shape.experts
    if shape.layers == under_way:
        return 0
    return max(0, (capacity * shape.layers - under_way * shape.experts) // (shape.layers - under_way))
