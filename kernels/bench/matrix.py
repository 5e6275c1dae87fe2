"""The matrix of layers that `moe_ffn` must get right, as a pairwise cover: any two values of different axes meet in at least
one case. The test suite runs it in the interpreter, `make gpu PART=kernels` on a GPU."""

import itertools

import torch

from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import moe_ffn_ref
from apexk.kernels.triton.tune import LayerTiles, Tile

from .poisoned import Guard, build_layer, compare

E = 12
AXES = {
    # H, I: powers of two, odd multiples of 16, multiples of 8 only, 1408 scaled down (11 * 16: no block of 32 divides it)
    "sizes": [(64, 32), (96, 80), (72, 40), (64, 176)],
    "T": [1, 2, 7, 16, 17, 33],
    "topk": [1, 2, 8, 10],
    "resident": ["some", "all", "one", "none"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "loads": ["even", "skewed", "all_to_one", "one_each", "ends_empty", "middle_empty", "duplicates", "padding"],
    "tiles": ["plain", "swapped", "persistent", "wide"],
    "ids": [torch.int64, torch.int32],
}
TILES = {
    "plain": LayerTiles(Tile(16, 64, 64, 4, 2), Tile(16, 64, 64, 4, 2)),
    "swapped": LayerTiles(Tile(16, 64, 64, 4, 2, swap_ab=True), Tile(16, 64, 64, 4, 2, swap_ab=True)),
    "persistent": LayerTiles(Tile(16, 32, 64, 4, 2, 2, persistent=1), Tile(16, 32, 64, 4, 2, 2, persistent=1)),
    "wide": LayerTiles(Tile(32, 64, 128, 4, 2), Tile(32, 128, 32, 4, 2)),
}


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def gain(axis, value, chosen, open_pairs):
    """Pairs that this value would meet for the first time."""
    return sum(tuple(sorted([(axis, value), other], key=lambda p: p[0])) in open_pairs for other in chosen.items())


def pairwise(axes):
    """A cover by greed: each case takes, axis by axis, the value that meets most pairs not met so far."""
    values = list(axes.values())
    open_pairs = {((i, a), (j, b)) for i, j in itertools.combinations(range(len(values)), 2) for a in values[i] for b in values[j]}
    cases = []
    while open_pairs:
        chosen = dict(min(open_pairs, key=str))
        for axis in range(len(values)):
            if axis not in chosen:
                gains = [gain(axis, value, chosen, open_pairs) for value in values[axis]]
                chosen[axis] = values[axis][gains.index(max(gains))]
        case = tuple(chosen[axis] for axis in range(len(values)))
        open_pairs -= pairs_of(case)
        cases.append(case)
    return cases


CASES = pairwise(AXES)


def draw_ids(loads, T, topk, generator):
    """Choices int64 [T, topk] of E experts with the named distribution."""
    odds = torch.ones(E)
    if loads == "skewed":
        odds = 1 / torch.arange(1, E + 1) ** 1.5
    ids = torch.multinomial(odds.expand(T, -1), topk, generator=generator)
    if loads == "all_to_one":
        ids = torch.full_like(ids, 5)
    elif loads == "one_each":
        ids = (torch.arange(T * topk) % E).reshape(T, topk)
    elif loads == "ends_empty":
        ids = 1 + ids % (E - 2)
    elif loads == "middle_empty":
        ids = torch.where((ids == 5) | (ids == 6), 0, ids)
    elif loads == "duplicates":
        ids[:, topk // 2 :] = ids[:, :1]
    elif loads == "padding":
        ids[torch.rand(T, topk, generator=generator) < 0.4] = -1
    return ids


def table(resident, generator):
    count = {"some": 7, "all": E, "one": 1, "none": 0}[resident]
    slot_of = torch.full((E,), -1, dtype=torch.int32)
    slots = count if resident == "one" else count + 2
    slot_of[torch.randperm(E, generator=generator)[:count]] = torch.randperm(slots, generator=generator)[:count].int()
    if resident == "one":  # the expert that "all_to_one" asks for
        slot_of.fill_(-1)
        slot_of[5] = 0
    return slot_of, slots


def name(case):
    sizes, T, topk, resident, dtype, loads, tiles, ids = case
    return f"{sizes[0]}x{sizes[1]}-T{T}-top{topk}-{resident}-{str(dtype)[6:]}-{loads}-{tiles}-{str(ids)[6:]}"


def check(case, device) -> float:
    """Largest error of one case against float64; AssertionError where it is too large or something else was touched."""
    (H, I), T, topk, resident, dtype, loads, tiles, id_type = case
    guard, generator = Guard(device), torch.Generator().manual_seed(T * 100 + topk)
    slot_of, slots = table(resident, generator)
    ids = draw_ids(loads, T, topk, generator).to(id_type)
    layer = build_layer(guard, generator, ids, H=H, I=I, experts=E, slots=slots, slot_of=slot_of, dtype=dtype)
    got, want = guard(layer.fresh_out()), layer.fresh_out().double()
    step = Workspace(T, topk, E, H, I, dtype, layer.x.device, TILES[tiles]).begin(layer.ids)
    step.act = guard(torch.full_like(step.act, float("nan")))
    moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, got, step=step)
    moe_ffn_ref(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, want)
    guard.compare()
    return compare(got, want, dtype)
