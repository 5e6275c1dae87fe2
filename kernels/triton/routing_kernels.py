"""Routing on the device: group pairs by slot, count the experts' loads, list the GEMM's tiles, rank predicted experts.

Every order is that of the pair index and every sum is of integers, so results are the same in each run: there are no
atomic cursors. Each program reads all pairs and writes what belongs to its one group; with a few hundred pairs (decode)
that is one load, and with tens of thousands the reads come from the L2 cache.

    group(p)     = slot_of[ids[p]], none where the id or the slot is -1
    offsets[g]   = number of pairs with a group below g
    rows         = pairs sorted by (group, pair)
    tiles        = for each group, in order, one tile for every BLOCK_M of its rows
    rank(e)      = number of experts with (load, score, -id) above those of e
"""

import triton
import triton.language as tl

SCORE_SCALE = tl.constexpr(float(1 << 24))  # as in reference.py: scores are summed as integers


@triton.jit
def _groups_of(ids, slot_of_ptr, MAPPED: tl.constexpr):
    """Group of each id, -1 for none."""
    if MAPPED:
        return tl.load(slot_of_ptr + ids, mask=ids >= 0, other=-1)
    else:
        return ids


@triton.jit
def _list_tiles(counts, group, tile_group_ptr, tile_row_ptr, max_tiles, GROUPS_PAD: tl.constexpr, BLOCK: tl.constexpr,
                BLOCK_M: tl.constexpr):
    """Write the tiles of one group, and this program's share of the unused end of the list."""
    bins = tl.arange(0, GROUPS_PAD)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < group, tiles, 0), 0)
    row0 = tl.sum(tl.where(bins < group, counts, 0), 0)
    mine = tl.sum(tl.where(bins == group, tiles, 0), 0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, mine, BLOCK):
        index = start + lane
        tl.store(tile_group_ptr + first + index, tl.zeros_like(index) + group, mask=index < mine)
        tl.store(tile_row_ptr + first + index, row0 + index * BLOCK_M, mask=index < mine)
    used = tl.sum(tiles, 0)
    for start in range(tl.program_id(0) * BLOCK, max_tiles, tl.num_programs(0) * BLOCK):
        index = start + lane
        unused = (index >= used) & (index < max_tiles)
        tl.store(tile_group_ptr + index, tl.full((BLOCK,), -1, tl.int32), mask=unused)
        tl.store(tile_row_ptr + index, tl.zeros_like(index), mask=unused)


# Counts that change from step to step are not specialised on: a value of 1, or one divisible by 16, would compile anew.
@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_groups", "max_tiles"])
def _route_kernel(
    topk_ids_ptr,  # [TK] int32 or int64, -1 is padding
    slot_of_ptr,  # [E] int32, -1 without a slot; not read unless MAPPED
    loads_ptr,  # [E] int32 out
    ids_ptr,  # [TK] int32 out, the ids beside the loads: one copy takes both to the host
    offsets_ptr,  # [S+1] int32 out
    rows_ptr,  # [TK] int32 out, -1 past the last
    tile_group_ptr,  # [max_tiles] int32 out, -1 for none
    tile_row_ptr,  # [max_tiles] int32 out
    num_pairs,
    num_experts,
    num_groups,
    max_tiles,
    MAPPED: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (max(E, S),): program i counts expert i and writes the rows and tiles of group i."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((GROUPS_PAD,), tl.int32)
    load = 0
    for start in range(0, num_pairs, BLOCK):
        mask = start + lane < num_pairs
        ids = tl.load(topk_ids_ptr + start + lane, mask=mask, other=-1).to(tl.int32)
        groups = _groups_of(ids, slot_of_ptr, MAPPED)
        counts += tl.histogram(tl.where(groups >= 0, groups, 0), GROUPS_PAD, mask=groups >= 0)
        load += tl.sum((ids == pid).to(tl.int32), 0)
    if pid < num_experts:
        tl.store(loads_ptr + pid, load)

    bins = tl.arange(0, GROUPS_PAD)
    total = tl.sum(counts, 0)
    mine = tl.sum(tl.where(bins == pid, counts, 0), 0)
    row0 = tl.sum(tl.where(bins < pid, counts, 0), 0)
    if pid < num_groups:
        tl.store(offsets_ptr + pid, row0)
        if pid == num_groups - 1:
            tl.store(offsets_ptr + num_groups, total)
    if mine > 0:
        for start in range(0, num_pairs, BLOCK):
            mask = start + lane < num_pairs
            ids = tl.load(topk_ids_ptr + start + lane, mask=mask, other=-1).to(tl.int32)
            match = (_groups_of(ids, slot_of_ptr, MAPPED) == pid).to(tl.int32)
            tl.store(rows_ptr + row0 + tl.cumsum(match, 0) - 1, start + lane, mask=match > 0)
            row0 += tl.sum(match, 0)
    for start in range(pid * BLOCK, num_pairs, tl.num_programs(0) * BLOCK):
        index = start + lane
        mask = index < num_pairs
        tl.store(ids_ptr + index, tl.load(topk_ids_ptr + index, mask=mask, other=-1).to(tl.int32), mask=mask)
        tl.store(rows_ptr + index, tl.full((BLOCK,), -1, tl.int32), mask=mask & (index >= total))
    _list_tiles(counts, pid, tile_group_ptr, tile_row_ptr, max_tiles, GROUPS_PAD, BLOCK, BLOCK_M)


@triton.jit(do_not_specialize=["num_groups", "max_tiles"])
def _tiles_kernel(
    offsets_ptr,  # [S+1] int32
    tile_group_ptr,  # [max_tiles] int32 out
    tile_row_ptr,  # [max_tiles] int32 out
    num_groups,
    max_tiles,
    GROUPS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (S,): the tile list of rows that are grouped already."""
    bins = tl.arange(0, GROUPS_PAD)
    here = bins < num_groups
    counts = tl.load(offsets_ptr + bins + 1, mask=here, other=0) - tl.load(offsets_ptr + bins, mask=here, other=0)
    _list_tiles(counts, tl.program_id(0), tile_group_ptr, tile_row_ptr, max_tiles, GROUPS_PAD, BLOCK, BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs"])
def _score_kernel(
    topk_ids_ptr,  # [TK] int32 or int64
    topk_weights_ptr,  # [TK] fp32
    loads_ptr,  # [E] int32 out
    scores_ptr,  # [E] fp32 out
    num_pairs,
    BLOCK: tl.constexpr,
):
    """Grid (E,): load and summed weight of one expert."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    load = 0
    score = tl.zeros((), tl.int64)
    for start in range(0, num_pairs, BLOCK):
        mask = start + lane < num_pairs
        ids = tl.load(topk_ids_ptr + start + lane, mask=mask, other=-1).to(tl.int32)
        weights = tl.load(topk_weights_ptr + start + lane, mask=ids == pid, other=0.0)
        load += tl.sum((ids == pid).to(tl.int32), 0)
        score += tl.sum((weights * SCORE_SCALE).to(tl.int64), 0)
    tl.store(loads_ptr + pid, load)
    tl.store(scores_ptr + pid, score.to(tl.float32) / SCORE_SCALE)


@triton.jit(do_not_specialize=["num_experts"])
def _order_kernel(
    loads_ptr,  # [E] int32
    scores_ptr,  # [E] fp32
    order_ptr,  # [E] int32 out
    num_experts,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(E, BLOCK),): each expert's place is the number of experts before it."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, EXPERTS_PAD)
    load = tl.load(loads_ptr + mine, mask=mine < num_experts, other=-1)[:, None]
    score = tl.load(scores_ptr + mine, mask=mine < num_experts, other=0.0)[:, None]
    loads = tl.load(loads_ptr + other, mask=other < num_experts, other=-1)[None, :]
    scores = tl.load(scores_ptr + other, mask=other < num_experts, other=0.0)[None, :]
    earlier = (loads == load) & ((scores > score) | ((scores == score) & (other[None, :] < mine[:, None])))
    place = tl.sum(((loads > load) | earlier).to(tl.int32), 1)
    tl.store(order_ptr + place, mine, mask=mine < num_experts)
