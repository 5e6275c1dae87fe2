"""`moe_ffn`: the grouped FFN of any subset of a layer's experts, from token rows to one weighted row a pair.

A layer runs it once for the experts that are in the pool and once more for each wave that arrives, with another slot
table and the same `out`: the rows are disjoint, so the launches need no lock, and any split gives the same bits. With
a `Workspace` whose routing was made once, a call is two launches and allocates nothing.
"""

from dataclasses import dataclass

import torch

from .checks import FLOATS, IDS, check, check_choice, check_launchable, check_pairs, check_weights
from .grouped_gemm import PRECISIONS, Arrivals, launch_gated, launch_grouped
from .reference import ACTIVATIONS, Routing
from .routing import route, routing_ints
from .tune import LayerTiles, choose_tiles, target_of


@dataclass
class Workspace:
    """What the calls of one layer and step share. `act` rows belong to experts, so concurrent phases do not collide."""

    tiles: LayerTiles
    ints: torch.Tensor  # int32, the routing's buffer; starts with loads and ids, see routing.demand_view
    act: torch.Tensor  # [pairs, I] weight dtype, h between the two GEMMs
    routing: Routing | None = None  # pairs by expert, once `route_tokens` ran for this step

    @classmethod
    def allocate(cls, tokens, topk, experts, hidden, inter, dtype, device, tiles=None):
        """For steps of exactly `tokens` tokens; the tile choice goes by that number."""
        pairs = tokens * topk
        tiles = tiles or choose_tiles(pairs, experts, hidden, inter, dtype, target_of(torch.device(device)))
        ints = torch.empty(routing_ints(pairs, experts, experts, tiles.block_m), dtype=torch.int32, device=device)
        return cls(tiles, ints, torch.empty(pairs, inter, dtype=dtype, device=device))

    def route_tokens(self, topk_ids, experts) -> Routing:
        """Group this step's pairs by expert. One launch."""
        self.routing = route(topk_ids, None, experts, block_m=self.tiles.block_m, out=self.ints)
        return self.routing


def moe_ffn(x, w13, w2, topk_ids, topk_weights, slot_of, out, *, activation="silu", b13=None, b2=None,
            weight_on_input=False, workspace: Workspace | None = None, precision="ieee", arrivals: Arrivals | None = None) -> None:
    """out[t*topk + k] = weight * FFN of the pair's expert, for pairs whose expert has a slot; see `moe_ffn_ref`.

    x [T, H], w13 [S, 2I, H], w2 [S, H, I] (views of the pool), topk_ids [T, topk], topk_weights fp32 [T, topk],
    slot_of int32 [E], out fp32 [T*topk, H]. With `weight_on_input` the weight multiplies x instead of the result. With
    `arrivals` the tiles wait for their slots. Two launches, and one more where the workspace holds no routing yet.
    """
    _check(x, w13, w2, topk_ids, topk_weights, slot_of, out, activation, b13, b2, precision)
    if arrivals is not None:
        check("arrivals.ready", arrivals.ready, (w13.shape[0],), (torch.int32,), like=x)
        check("arrivals.late", arrivals.late, (1,), (torch.int32,), like=x)
    tokens, topk = topk_ids.shape
    hidden, inter, experts = x.shape[1], w2.shape[2], slot_of.numel()
    if tokens == 0:
        return
    if workspace is None:
        workspace = Workspace.allocate(tokens, topk, experts, hidden, inter, x.dtype, x.device)
    check("workspace.act", workspace.act, (tokens * topk, inter), (x.dtype,), like=x)
    routing = workspace.routing or workspace.route_tokens(topk_ids, experts)
    tiles = workspace.tiles
    before, after = (topk_weights, None) if weight_on_input else (None, topk_weights)
    common = dict(slot_of=slot_of, precision=precision, arrivals=arrivals)
    launch_gated(x, w13, workspace.act, routing, tiles.gated, activation, topk=topk, weights=before, bias=b13, **common)
    launch_grouped(workspace.act, w2, out, routing, tiles.down, scatter=True, weights=after, bias=b2, **common)


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
