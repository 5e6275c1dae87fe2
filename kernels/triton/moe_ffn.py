"""`moe_ffn`: the grouped FFN of any subset of a layer's experts, from token rows to one weighted row a pair.

A layer runs it once for the experts that are in the pool and once more for each wave that arrives, with another slot
table and the same `out`: the rows are disjoint, so the launches need no lock, and any split gives the same bits.

    step = workspace.begin(topk_ids)                                                    one launch: pairs by expert
    moe_ffn(x, w13, w2, topk_ids, topk_weights, resident, pairs, step=step)             two launches
    moe_ffn(x, w13, w2, topk_ids, topk_weights, arrived, pairs, step=step)              two launches
    combine(pairs, topk, out, shared)                                                   one launch
"""

from dataclasses import dataclass

import torch

from .checks import FLOATS, IDS, check, check_choice, check_launchable, check_pairs, check_weights
from .grouped_gemm import PRECISIONS, Arrivals, launch_gated, launch_grouped
from .reference import ACTIVATIONS, Routing
from .routing import demand_view, route, routing_ints
from .tune import ROWS, LayerTiles, choose_tiles, target_of


@dataclass
class Step:
    """What the calls of one layer and step share."""

    topk_ids: torch.Tensor  # [T, topk] that the routing was made from
    tiles: LayerTiles
    routing: Routing  # pairs by expert: each call looks slots up in its own table
    act: torch.Tensor  # [T*topk, I], h between the two GEMMs; rows belong to experts, so concurrent phases do not collide
    demand: torch.Tensor  # int32 [E + T*topk], loads and ids, adjacent for one copy to the host


class Workspace:
    """Memory of a layer's steps with up to `max_tokens` tokens, allocated once. One step at a time uses it."""

    def __init__(self, max_tokens, topk, experts, hidden, inter, dtype, device, tiles: LayerTiles | None = None):
        pairs = max_tokens * topk
        self.topk, self.experts, self.hidden, self.inter = topk, experts, hidden, inter
        self.target, self.tiles = target_of(torch.device(device)), tiles
        block_m = tiles.block_m if tiles else min(ROWS)
        self.ints = torch.empty(routing_ints(pairs, experts, experts, block_m), dtype=torch.int32, device=device)
        self.act = torch.empty(pairs, inter, dtype=dtype, device=device)

    def begin(self, topk_ids) -> Step:
        """Group a step's pairs by expert. The step before must have been used up by what is enqueued."""
        check("topk_ids", topk_ids, ("T", self.topk), IDS, like=self.act)
        pairs = topk_ids.numel()
        if pairs > self.act.shape[0]:
            raise ValueError(f"topk_ids: has {pairs} pairs, wanted at most {self.act.shape[0]}, for which this workspace was made")
        tiles = self.tiles or choose_tiles(pairs, self.experts, self.hidden, self.inter, self.act.dtype, self.target)
        routing = route(topk_ids, None, self.experts, block_m=tiles.block_m, out=self.ints)
        return Step(topk_ids, tiles, routing, self.act[:pairs], demand_view(self.ints, pairs, self.experts))


def moe_ffn(x, w13, w2, topk_ids, topk_weights, slot_of, out, *, activation="silu", b13=None, b2=None,
            weight_on_input=False, step: Step | None = None, precision="ieee", arrivals: Arrivals | None = None) -> None:
    """out[t*topk + k] = weight * FFN of the pair's expert, for pairs whose expert has a slot; see `moe_ffn_ref`.

    x [T, H], w13 [S, 2I, H], w2 [S, H, I] (views of the pool), topk_ids [T, topk], topk_weights fp32 [T, topk],
    slot_of int32 [E], out fp32 [T*topk, H]. With `weight_on_input` the weight multiplies x instead of the result. With
    `arrivals` the tiles wait for their slots. Without a `step` the call makes and allocates its own.
    """
    _check(x, w13, w2, topk_ids, topk_weights, slot_of, out, activation, b13, b2, precision)
    if arrivals is not None:
        check("arrivals.ready", arrivals.ready, (w13.shape[0],), (torch.int32,), like=x)
        check("arrivals.late", arrivals.late, (1,), (torch.int32,), like=x)
    (tokens, topk), inter = topk_ids.shape, w2.shape[2]
    if tokens == 0:
        return
    if step is None:
        step = Workspace(tokens, topk, slot_of.numel(), x.shape[1], inter, x.dtype, x.device).begin(topk_ids)
    elif step.topk_ids is not topk_ids:
        raise ValueError("step: was begun with other topk_ids than this call has, wanted the same tensor")
    check("step.act", step.act, (tokens * topk, inter), (x.dtype,), like=x)
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    common = dict(slot_of=slot_of, precision=precision, arrivals=arrivals)
    tiles, routing = step.tiles, step.routing
    launch_gated(x, w13, step.act, routing, tiles.gated, activation, topk=topk, weights=before, bias=b13, **common)
    launch_grouped(step.act, w2, out, routing, tiles.down, scatter=True, weights=after, bias=b2, **common)


def _check(x, w13, w2, topk_ids, topk_weights, slot_of, out, activation, b13, b2, precision):
    check("x", x, ("T", "H"), FLOATS, rows_contiguous=True)
    tokens, hidden = x.shape
    check("topk_ids", topk_ids, (tokens, "topk"), IDS, like=x)
    topk = topk_ids.shape[1]
    check_pairs(tokens, topk)
    check("topk_weights", topk_weights, (tokens, topk), (torch.float32,), like=x)
    check("slot_of", slot_of, ("E",), (torch.int32,), like=x)
    check_weights("w2", w2, ("S", hidden, "I"), x)
    slots, _, inter = w2.shape
    check_weights("w13", w13, (slots, 2 * inter, hidden), x)
    check("out", out, (tokens * topk, hidden), (torch.float32,), like=x)
    for name, bias, width in (("b13", b13, 2 * inter), ("b2", b2, hidden)):
        if bias is not None:
            check(name, bias, (slots, width), (x.dtype,), like=x, rows_contiguous=True)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("precision", precision, PRECISIONS)
    check_launchable(x)
