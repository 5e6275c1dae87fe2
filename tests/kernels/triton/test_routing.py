"""Routing and ranking are integers: every result must equal the reference exactly."""

import pytest
import torch

from apexk.kernels.triton.reference import rank_ref, route_ref
from apexk.kernels.triton.routing import demand_view, list_tiles, max_tiles, rank, route, routing_ints

E, S = 12, 7


def slot_table(rng, resident=5):
    """Some experts in shuffled slots; at least one slot stays empty."""
    table = torch.full((E,), -1, dtype=torch.int32)
    table[torch.randperm(E, generator=rng)[:resident]] = torch.randperm(S, generator=rng)[:resident].int()
    return table


def ids_of(case, rng):
    if case == "no_token":
        return torch.empty(0, 3, dtype=torch.int64)
    if case == "one_token":
        return torch.tensor([[11, 0, 5]])
    if case == "all_to_one":  # duplicates within a token too
        return torch.full((9, 3), 4)
    if case == "padding":  # -1 must count nowhere
        ids = torch.randint(0, E, (6, 3), generator=rng)
        ids[::2, 1] = -1
        ids[5] = -1
        return ids
    if case == "every_expert":
        return torch.arange(E).reshape(4, 3)
    if case == "past_one_block":  # more pairs than a program reads at a time
        return torch.randint(0, E, (400, 3), generator=rng)
    return torch.randint(0, E, (7, 3), generator=rng, dtype=torch.int32)  # int32 ids


CASES = ["no_token", "one_token", "all_to_one", "padding", "every_expert", "past_one_block", "int32_ids"]


def check_routing(got, want, num_groups, block_m):
    n = int(want.offsets[-1])
    assert torch.equal(got.loads.cpu(), want.loads)
    assert torch.equal(got.offsets.cpu(), want.offsets)
    assert torch.equal(got.rows[:n].cpu(), want.rows)
    assert (got.rows[n:] == -1).all()
    check_tiles(got.tile_group, got.tile_row, want.offsets, block_m)


def check_tiles(tile_group, tile_row, offsets, block_m):
    """The list covers each group's rows, in order, and nothing else."""
    wanted = [
        (g, row)
        for g in range(len(offsets) - 1)
        for row in range(int(offsets[g]), int(offsets[g + 1]), block_m)
    ]  # fmt: skip
    got = list(zip(tile_group.tolist(), tile_row.tolist(), strict=True))
    assert got[: len(wanted)] == wanted
    assert all(group == -1 for group, _ in got[len(wanted) :])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_m", [2, 16])
def test_route_equals_reference(case, block_m, device, rng):
    table, ids = slot_table(rng), ids_of(case, rng)
    got = route(ids.to(device), table.to(device), S, block_m=block_m)
    check_routing(got, route_ref(ids, table, S), S, block_m)


@pytest.mark.parametrize("case", CASES)
def test_route_by_expert_is_the_identity_table(case, device, rng):
    ids = ids_of(case, rng)
    got = route(ids.to(device), None, E, block_m=4)
    check_routing(got, route_ref(ids, torch.arange(E, dtype=torch.int32), E), E, 4)


def test_nothing_resident(device, rng):
    ids, table = ids_of("int32_ids", rng), torch.full((E,), -1, dtype=torch.int32)
    check_routing(route(ids.to(device), table.to(device), S), route_ref(ids, table, S), S, 16)


def test_more_slots_than_experts_and_the_reverse(device, rng):
    ids = torch.randint(0, 3, (5, 2), generator=rng)
    table = torch.tensor([129, -1, 5], dtype=torch.int32)  # one padded histogram of 128 is not enough
    check_routing(route(ids.to(device), table.to(device), 130), route_ref(ids, table, 130), 130, 16)
    ids = torch.randint(0, 20, (20, 4), generator=rng)
    table = (torch.arange(20, dtype=torch.int32) % 3) - 1
    check_routing(route(ids.to(device), table.to(device), 2), route_ref(ids, table, 2), 2, 16)


def test_outputs_stay_inside_the_buffer(device, rng):
    ids, table = ids_of("padding", rng), slot_table(rng)
    need = routing_ints(ids.numel(), E, S, 4)
    guarded = torch.full((need + 20,), 77, dtype=torch.int32, device=device)
    got = route(ids.to(device), table.to(device), S, block_m=4, out=guarded[10:-10])
    check_routing(got, route_ref(ids, table, S), S, 4)
    assert (guarded[:10] == 77).all() and (guarded[-10:] == 77).all()
    demand = demand_view(guarded[10:-10], ids.numel(), E).cpu()
    assert torch.equal(demand, torch.cat([got.loads.cpu(), ids.flatten().int()]))


def test_max_tiles_is_reached_and_never_passed():
    for pairs in range(0, 9):
        for groups in (1, 2, 3):
            for block_m in (1, 2, 3):
                worst = 0
                for loads in torch.cartesian_prod(*[torch.arange(pairs + 1)] * groups).reshape(-1, groups).tolist():
                    if sum(loads) == pairs:
                        worst = max(worst, sum(-(-n // block_m) for n in loads))
                assert max_tiles(pairs, groups, block_m) == worst


@pytest.mark.parametrize("loads", [[0, 3, 0], [5, 0, 4, 1], [0], [16, 17, 15, 33]])
def test_list_tiles(loads, device):
    offsets = torch.cat([torch.zeros(1), torch.cumsum(torch.tensor(loads), 0)]).int()
    group, row = list_tiles(offsets.to(device), sum(loads), 4)
    check_tiles(group, row, offsets, 4)


@pytest.mark.parametrize("case", CASES)
def test_rank_equals_reference(case, device, rng):
    ids = ids_of(case, rng)
    weights = torch.rand(ids.shape, generator=rng)
    for got, want in zip(rank(ids.to(device), weights.to(device), E), rank_ref(ids, weights, E), strict=True):
        assert torch.equal(got.cpu(), want)


def test_rank_breaks_ties_by_score_then_by_id(device):
    ids = torch.tensor([[3, 1], [3, 2], [0, 1], [2, 4]])
    weights = torch.tensor([[0.5, 0.25], [0.25, 0.5], [0.5, 0.5], [0.5, 0.125]])
    loads, scores, order = rank(ids.to(device), weights.to(device), 6)
    assert loads.tolist() == [1, 2, 2, 2, 1, 0]
    assert scores.tolist() == [0.5, 0.75, 1.0, 0.75, 0.125, 0.0]
    assert order.tolist() == [2, 1, 3, 0, 4, 5]


def test_rank_does_not_depend_on_the_order_of_tokens(device, rng):
    ids, weights = ids_of("past_one_block", rng), torch.rand(400, 3, generator=rng)
    shuffle = torch.randperm(400, generator=rng)
    one = rank(ids.to(device), weights.to(device), E)
    two = rank(ids[shuffle].to(device), weights[shuffle].to(device), E)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_refusals(device, rng):
    ids, table = ids_of("int32_ids", rng).to(device), slot_table(rng).to(device)
    with pytest.raises(TypeError, match="topk_ids: got torch.float32, wanted torch.int32 or torch.int64"):
        route(ids.float(), table, S)
    with pytest.raises(ValueError, match=r"topk_ids: got shape \[21\], wanted \[T, topk\]"):
        route(ids.flatten(), table, S)
    with pytest.raises(ValueError, match="topk_ids: strides are .*, wanted a contiguous tensor"):
        route(ids.T, table, S)
    with pytest.raises(TypeError, match="slot_of: got torch.int64"):
        route(ids, table.long(), S)
    with pytest.raises(ValueError, match="num_slots = 0"):
        route(ids, table, 0)
    with pytest.raises(ValueError, match="out: got 5 integers, wanted at least"):
        route(ids, table, S, out=torch.empty(5, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"topk_weights: got shape \[7, 2\], wanted \[7, 3\]"):
        rank(ids, torch.rand(7, 2, device=device), E)
