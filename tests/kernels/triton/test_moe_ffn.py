"""The joined FFN against its float64 twin, and the promises between calls: phases, permutations, repeats, moved experts."""

from dataclasses import replace

import pytest
import torch

from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import ACTIVATIONS, moe_ffn_ref
from apexk.kernels.triton.tune import LayerTiles, Tile

SLOW = pytest.mark.slow
# bfloat16 always, the others in the full run: the interpreter takes a second a layer
DTYPES = [pytest.param(torch.float32, marks=SLOW), pytest.param(torch.float16, marks=SLOW), torch.bfloat16]
TILES = LayerTiles(Tile(16, 64, 32, 4, 2), Tile(16, 32, 64, 4, 2))  # two blocks along K, and along N where it matters
SWAPPED = LayerTiles(Tile(16, 64, 32, 4, 2, swap_ab=True), Tile(16, 32, 64, 4, 2, swap_ab=True))


def run(layer, slot_of=None, out=None, tiles=TILES, **options):
    """One launch with NaN in the scratch beforehand."""
    out = layer.fresh_out() if out is None else out
    slot_of = layer.slot_of if slot_of is None else slot_of
    (tokens, hidden), inter = layer.x.shape, layer.w2.shape[2]
    workspace = Workspace(tokens, layer.topk, slot_of.numel(), hidden, inter, layer.x.dtype, layer.x.device, tiles)
    workspace.act.fill_(float("nan"))
    step = workspace.begin(layer.ids)
    moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, slot_of, out, step=step, **options)
    return out


def reference(layer, slot_of=None, **options):
    out = layer.fresh_out().double()
    moe_ffn_ref(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of if slot_of is None else slot_of, out, **options)
    return out


def table(*pairs, experts=10):
    slot_of = torch.full((experts,), -1, dtype=torch.int32)
    for expert, slot in pairs:
        slot_of[expert] = slot
    return slot_of


CASES = {
    "drawn": dict(),
    "one_token": dict(T=1),
    "sizes_of_no_block": dict(H=96, I=80),
    "tail_along_k": dict(H=72, I=40),  # K is a multiple of 8 only: the last block needs its mask
    "one_choice": dict(topk=1),
    "every_expert_chosen": dict(topk=10),
    "nothing_resident": dict(slot_of=table()),
    "all_resident": dict(slots=10, resident=10),
    "one_slot": dict(slots=1, resident=1),
    "all_to_one": dict(ids=torch.full((6, 3), 4), slot_of=table((4, 2), (5, 0))),  # duplicates in a token
    "a_row_under_a_tile": dict(ids=torch.full((15, 1), 4), slot_of=table((4, 2))),
    "exactly_a_tile": dict(ids=torch.full((16, 1), 4), slot_of=table((4, 2))),
    "a_row_over_a_tile": dict(ids=torch.full((17, 1), 4), slot_of=table((4, 2))),
    "two_tiles": dict(ids=torch.full((32, 1), 4), slot_of=table((4, 2))),
    "empty_first_middle_last": dict(ids=torch.tensor([[1, 3], [3, 8], [8, 1]]), slot_of=table((0, 5), (1, 4), (3, 3), (5, 2), (8, 1), (9, 0))),
    "padding": dict(ids=torch.tensor([[1, -1, 3], [-1, -1, -1], [3, 3, -1]]), slot_of=table((1, 4), (3, 0))),
    "int32_ids": dict(ids=torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)),
}


@pytest.mark.parametrize("case", CASES)
def test_fp32_equals_reference(case, make_layer, close):
    layer = make_layer(**CASES[case])
    close(run(layer), reference(layer), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", ["sizes_of_no_block", "tail_along_k", "all_to_one", "padding"])
def test_half_precision_equals_reference(case, dtype, make_layer, close):
    layer = make_layer(**CASES[case], dtype=dtype)
    close(run(layer), reference(layer), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["sizes_of_no_block", "tail_along_k", "a_row_over_a_tile"])
def test_swapped_operands_equal_reference(case, dtype, make_layer, close):
    layer = make_layer(**CASES[case], dtype=dtype)
    close(run(layer, tiles=SWAPPED), reference(layer), dtype)


def test_tiles_that_tune_chooses(make_layer, close):
    layer = make_layer(dtype=torch.bfloat16)
    out = layer.fresh_out()
    moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, out)
    close(out, reference(layer), torch.bfloat16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation, make_layer, close, rng, guard):
    layer = make_layer(dtype=torch.float16)
    layer.x.mul_(6)  # far enough out for the clamps of gpt-oss
    slots, both, hidden = layer.w13.shape
    b13 = guard(torch.randn(slots, both, generator=rng).half())
    b2 = guard(torch.randn(slots, hidden, generator=rng).half())
    options = dict(activation=activation, b13=b13, b2=b2)
    close(run(layer, **options), reference(layer, **options), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_on_the_input(dtype, make_layer, close):
    """Llama 4: the weight multiplies x, and the product is rounded before the first GEMM."""
    layer = make_layer(topk=1, dtype=dtype)
    close(run(layer, weight_on_input=True), reference(layer, weight_on_input=True), dtype)


def test_few_programs_with_several_tiles_each(make_layer):
    """Persistent launches do the same pieces of work, so they give the same bits."""
    layer = make_layer(T=12, dtype=torch.bfloat16)
    persistent = LayerTiles(replace(TILES.gated, persistent=1), replace(TILES.down, persistent=1))
    assert torch.equal(run(layer, tiles=persistent).nan_to_num(9), run(layer).nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_split_into_phases_is_bitwise_one_launch(dtype, make_layer):
    layer = make_layer(T=12, topk=2, experts=6, slots=6, resident=6, dtype=dtype)
    whole = run(layer)
    resident = torch.nonzero(layer.slot_of >= 0).flatten()
    for cut in (1, 4):
        first, second = layer.slot_of.clone(), layer.slot_of.clone()
        first[resident[cut:]] = -1
        second[resident[:cut]] = -1
        out = run(layer, slot_of=first)
        run(layer, slot_of=second, out=out)
        assert torch.equal(out.nan_to_num(9), whole.nan_to_num(9))


def test_phases_share_one_step(make_layer):
    """A workspace made for more tokens, begun once, used by two phases; then begun again for fewer tokens."""
    layer = make_layer(T=9, slots=6, resident=6)
    workspace = Workspace(12, 3, 10, 64, 48, torch.float32, layer.x.device, TILES)
    step, out = workspace.begin(layer.ids), layer.fresh_out()
    assert torch.equal(step.demand.cpu(), torch.cat([step.routing.loads.cpu(), layer.ids.flatten().int().cpu()]))
    first, second = layer.slot_of.clone(), layer.slot_of.clone()
    first[torch.nonzero(layer.slot_of >= 0).flatten()[:3]] = -1
    second[torch.nonzero(first >= 0).flatten()] = -1
    for slot_of in (first, second):
        moe_ffn(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, slot_of, out, step=step)
    whole = run(layer)
    assert torch.equal(out.nan_to_num(9), whole.nan_to_num(9))
    x, ids, weights, out = layer.x[:4], layer.ids[:4], layer.weights[:4], layer.fresh_out()[:12]
    moe_ffn(x, layer.w13, layer.w2, ids, weights, layer.slot_of, out, step=workspace.begin(ids))
    assert torch.equal(out.nan_to_num(9), whole[:12].nan_to_num(9))


def test_a_step_of_other_tokens_is_refused(make_layer):
    layer = make_layer()
    workspace = Workspace(7, 3, 10, 64, 48, torch.float32, layer.x.device, TILES)
    step = workspace.begin(layer.ids)
    with pytest.raises(ValueError, match="step: was begun with other topk_ids"):
        moe_ffn(layer.x, layer.w13, layer.w2, layer.ids.clone(), layer.weights, layer.slot_of, layer.fresh_out(), step=step)
    with pytest.raises(ValueError, match="topk_ids: has 24 pairs, wanted at most 21"):
        workspace.begin(torch.zeros(8, 3, dtype=torch.int64, device=layer.x.device))


def test_repeat_is_bitwise_equal(make_layer):
    layer = make_layer(T=9, dtype=torch.bfloat16)
    assert torch.equal(run(layer).nan_to_num(9), run(layer).nan_to_num(9))


def test_token_order_does_not_matter(make_layer, rng):
    layer = make_layer(T=9, dtype=torch.bfloat16)
    one = run(layer).view(9, 3, -1)
    shuffle = torch.randperm(9, generator=rng).to(layer.x.device)
    for name in ("x", "ids", "weights"):
        getattr(layer, name).copy_(getattr(layer, name)[shuffle])
    assert torch.equal(run(layer).view(9, 3, -1).nan_to_num(9), one[shuffle].nan_to_num(9))


def test_expert_moved_to_another_slot(make_layer):
    """The same expert gives the same bits wherever it lies, and its old slot is not read any more."""
    layer = make_layer(ids=torch.tensor([[4, 1], [4, 4]]), slot_of=table((4, 2)))
    before = run(layer)
    for w in (layer.w13, layer.w2):
        w[5].copy_(w[2])
        w[2].fill_(float("nan"))
    layer.slot_of[4] = 5
    assert torch.equal(run(layer).nan_to_num(9), before.nan_to_num(9))


def test_rows_of_x_may_be_apart(make_layer, close):
    layer = make_layer()
    wide = torch.full((7, 100), float("nan"), device=layer.x.device)
    wide[:, 20:84] = layer.x
    layer.x = wide[:, 20:84]
    close(run(layer), reference(layer), torch.float32)


def test_no_token(make_layer):
    layer = make_layer(T=0)
    assert run(layer).shape == (0, 64)


def test_refusals(make_layer):
    layer = make_layer()
    good = dict(x=layer.x, w13=layer.w13, w2=layer.w2, topk_ids=layer.ids, topk_weights=layer.weights,
                slot_of=layer.slot_of, out=layer.fresh_out())  # fmt: skip
    bad = [
        (dict(x=layer.x[0]), ValueError, r"x: got shape \[64\], wanted \[T, H\]"),
        (dict(x=layer.x.double()), TypeError, "x: got torch.float64, wanted torch.float32 or"),
        (dict(w13=layer.w13.half()), TypeError, "w13: got torch.float16, wanted torch.float32"),
        (dict(w13=layer.w13[:, :-1]), ValueError, r"w13: got shape \[6, 95, 64\], wanted \[6, 96, 64\]"),
        (dict(w2=layer.w2.transpose(1, 2)), ValueError, r"w2: got shape \[6, 48, 64\], wanted \[S, 64, I\]"),
        (dict(w2=layer.w2[:, :, ::2], w13=layer.w13[:, ::2]), ValueError, "w2: its last axis has stride 2, wanted 1"),
        (dict(w13=layer.w13[:, :48], w2=layer.w2[:, :, :24]), ValueError, "w2: rows of one expert are 48 elements apart, wanted 24"),
        (dict(topk_ids=layer.ids[:5]), ValueError, r"topk_ids: got shape \[5, 3\], wanted \[7, topk\]"),
        (dict(topk_weights=layer.weights.half()), TypeError, "topk_weights: got torch.float16"),
        (dict(slot_of=layer.slot_of.long()), TypeError, "slot_of: got torch.int64, wanted torch.int32"),
        (dict(out=layer.fresh_out()[:-1]), ValueError, r"out: got shape \[20, 64\], wanted \[21, 64\]"),
        (dict(out=layer.fresh_out().half()), TypeError, "out: got torch.float16, wanted torch.float32"),
        (dict(activation="relu"), ValueError, "activation: got 'relu', wanted one of silu, gelu"),
        (dict(b2=layer.x), ValueError, r"b2: got shape \[7, 64\], wanted \[6, 64\]"),
        (dict(precision="bf16x3"), ValueError, "precision: got 'bf16x3', wanted one of ieee, tf32"),
    ]
    for change, error, message in bad:
        with pytest.raises(error, match=message):
            moe_ffn(**{**good, **change})
