"""Post-Fetch: misses run on the CPU, and are copied after the step for the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .arguments import require_bool
from .base import DEFAULTS, Policy
from .scan import by_load, choose
from .types import ModelShape, Phase, Plan, PolicyOptions, RouteView


class PostFetch(Policy):
    """Each layer's misses of a decode step, heaviest first and at most as many as there are slots, are copied after it.

    A layer that is reached before its copy has landed treats the expert as missed. With `sets` > 0 the pool is
    set-associative: expert e belongs to set e mod sets, of capacity/sets slots, and replaces within its set only. With
    `sync` the next step waits until all copies have landed; they count as exact ones.
    """

    name = "post_fetch"
    source = "Post-Fetch as the Apex paper describes it; set-associative option after Huang, Lin and Lee"
    speculates = False
    fetches = False
    waits_in_flight = False
    posts = True
    pool_scopes = ("layer",)
    evicts = "lru"

    def __init__(self, options: PolicyOptions = DEFAULTS, sets: int = 0, sync: bool = False):
        if type(sets) is not int or sets < 0:
            raise ValueError(f"post_fetch: sets is {sets!r}; wanted a whole number >= 0")
        require_bool("post_fetch", "sync", sync)
        super().__init__(options)
        self.sets, self.waits_for_posts = sets, sync
        self.missed: dict[int, list[int]] = {}
        self.used: dict[int, frozenset[int]] = {}

    def start(self, shape: ModelShape, capacity: int, *rest, **more) -> None:
        super().start(shape, capacity, *rest, **more)
        if self.sets and (self.capacity % self.sets or (shape.experts % self.sets and self.capacity)):
            raise ValueError(f"post_fetch: {self.capacity} slots and {shape.experts} experts cannot be split into {self.sets} equal sets")
        self.missed.clear()
        self.used.clear()

    def initial(self, layer: int) -> tuple[int, ...]:
        if not self.sets:
            return super().initial(layer)
        ways = self.capacity // self.sets
        order = self.by_popularity(layer)
        return tuple(e for s in range(self.sets) for e in [e for e in order if e % self.sets == s][:ways])

    def on_route(self, view: RouteView) -> Plan:
        self.missed[view.layer] = by_load(view)[1] if view.phase == "decode" else []
        return choose(view, limit=0)

    def on_layer_done(self, layer: int, step: int, phase: Phase, loads: Mapping[int, int]) -> None:
        super().on_layer_done(layer, step, phase, loads)
        self.used[layer] = frozenset(loads)

    def on_step_done(self, step: int) -> tuple[tuple[int, int], ...]:
        wanted = tuple((layer, e) for layer in sorted(self.missed) for e in self.missed[layer][: self.capacity])
        self.missed.clear()
        return wanted

    def victims_for(self, layer: int, incoming: Sequence[int], candidates: Collection[int], step: int) -> tuple[int, ...]:
        left, chosen = set(candidates), []
        for expert in incoming:
            pool = {e for e in left if e % self.sets == expert % self.sets} if self.sets else left
            idle = pool - self.used.get(layer, frozenset())
            found = self.victims(layer, idle or pool, 1, step)
            if not found:
                break
            chosen += found
            left.discard(found[0])
        return tuple(chosen)
