"""From the router's ids to what the GEMMs need, without a host sync: `route`, `rank`, and the tile list of `list_tiles`."""

import torch

from .checks import IDS, check, check_launchable, check_pairs
from .reference import Routing

BLOCK_PAIRS = 1024  # pairs a program reads at a time
MIN_PAD = 128  # a histogram of fewer bins than the block has threads is not worth a special case


def route(topk_ids, slot_of, num_slots, *, block_m=16, out=None) -> Routing:
    """Group the pairs of topk_ids [T, topk] by slot_of[id]; see `route_ref`. One launch.

    With `slot_of` None the groups are the experts and `num_slots` is their number: `grouped_gemm` and `moe_ffn` then look
    the slot up, so that one routing serves every phase of a layer. `rows` has room for all pairs and holds -1 past the
    last. `out` is a buffer of `routing_ints(...)` int32; its start, `demand_view`, is what the host wants to read.
    """
    num_experts = num_slots if slot_of is None else slot_of.numel()
    check("topk_ids", topk_ids, ("T", "topk"), IDS)
    check_pairs(*topk_ids.shape)
    if slot_of is not None:
        check("slot_of", slot_of, ("E",), (torch.int32,), like=topk_ids)
    if num_slots < 1 or num_experts < 1:
        raise ValueError(f"num_slots = {num_slots}, E = {num_experts}: wanted at least one of each")
    check_launchable(topk_ids)
    from . import routing_kernels as kernels

    pairs = topk_ids.numel()
    sizes = _sizes(pairs, num_experts, num_slots, block_m)
    if out is None:
        out = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device)
    check("out", out, ("n",), (torch.int32,), like=topk_ids)
    if out.numel() < sum(sizes):
        raise ValueError(f"out: got {out.numel()} integers, wanted at least {sum(sizes)}")
    routing, ids = unpack(out, pairs, num_experts, num_slots, block_m)
    grid = (max(num_experts, num_slots),)
    kernels._route_kernel[grid](
        topk_ids, slot_of, routing.loads, ids, routing.offsets, routing.rows, routing.tile_group, routing.tile_row,
        pairs, num_experts, num_slots, routing.tile_group.numel(),
        MAPPED=slot_of is not None, GROUPS_PAD=pad(num_slots), BLOCK=_block(pairs), BLOCK_M=block_m, num_warps=4,
    )  # fmt: skip
    return routing


def routing_ints(pairs, num_experts, num_slots, block_m) -> int:
    """Size of the buffer that holds a routing: loads, ids, offsets, rows, tiles."""
    return sum(_sizes(pairs, num_experts, num_slots, block_m))


def unpack(buffer, pairs, num_experts, num_slots, block_m):
    """(routing, ids int32 [T*topk]) as views of a routing's buffer."""
    sizes = _sizes(pairs, num_experts, num_slots, block_m)
    loads, ids, offsets, rows, tile_group, tile_row = buffer[: sum(sizes)].split(sizes)
    return Routing(loads, offsets, rows, tile_group, tile_row, block_m), ids


def demand_view(buffer, pairs, num_experts):
    """The loads [E] and ids [T*topk] at the start of a routing's buffer, adjacent: one copy to the host."""
    return buffer[: num_experts + pairs]


def max_tiles(pairs, num_groups, block_m) -> int:
    """Most tiles that any routing of so many pairs can need: every group that can be non-empty wastes part of one."""
    groups = min(pairs, num_groups)
    return groups + (pairs - groups) // block_m


def list_tiles(offsets, rows, block_m):
    """Tile list (group, first row) of `rows` rows that are grouped by offsets int32 [S+1] already. One launch."""
    check("offsets", offsets, ("S+1",), (torch.int32,))
    check_launchable(offsets)
    from . import routing_kernels as kernels

    groups = offsets.numel() - 1
    tiles = torch.empty(2, max_tiles(rows, groups, block_m), dtype=torch.int32, device=offsets.device)
    if rows:
        kernels._tiles_kernel[(groups,)](
            offsets, tiles[0], tiles[1], groups, tiles.shape[1],
            GROUPS_PAD=pad(groups), BLOCK=MIN_PAD, BLOCK_M=block_m, num_warps=4,
        )  # fmt: skip
    return tiles[0], tiles[1]


def rank(topk_ids, topk_weights, num_experts, *, out=None):
    """(loads int32 [E], scores fp32 [E], order int32 [E]) of predicted choices; see `rank_ref`. Two launches.

    The three lie in one buffer, `out` int32 [3, E], so that one copy takes them to the host.
    """
    check("topk_ids", topk_ids, ("T", "topk"), IDS)
    check_pairs(*topk_ids.shape)
    check("topk_weights", topk_weights, tuple(topk_ids.shape), (torch.float32,), like=topk_ids)
    if num_experts < 1:
        raise ValueError(f"num_experts = {num_experts}, wanted at least 1")
    check_launchable(topk_ids)
    from . import routing_kernels as kernels

    if out is None:
        out = torch.empty(3, num_experts, dtype=torch.int32, device=topk_ids.device)
    check("out", out, (3, num_experts), (torch.int32,), like=topk_ids)
    loads, scores, order = out[0], out[1].view(torch.float32), out[2]
    pairs = topk_ids.numel()
    kernels._score_kernel[(num_experts,)](topk_ids, topk_weights, loads, scores, pairs, BLOCK=_block(pairs), num_warps=4)
    block = 16
    kernels._order_kernel[(-(-num_experts // block),)](
        loads, scores, order, num_experts, EXPERTS_PAD=pad(num_experts), BLOCK=block, num_warps=4
    )
    return loads, scores, order


def pad(groups) -> int:
    """Power of two that holds every group."""
    return max(MIN_PAD, 1 << (groups - 1).bit_length())


def _block(pairs) -> int:
    return min(BLOCK_PAIRS, max(MIN_PAD, 1 << max(pairs - 1, 0).bit_length()))


def _sizes(pairs, num_experts, num_slots, block_m):
    tiles = max_tiles(pairs, num_slots, block_m)
    return [num_experts, pairs, num_slots + 1, pairs, tiles, tiles]
