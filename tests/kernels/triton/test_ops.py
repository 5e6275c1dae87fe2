"""The operators: schema, fake kernels and tracing, by PyTorch's own checks; results equal the plain functions'."""

import pytest
import torch

from apexk.kernels.triton import ops
from apexk.kernels.triton.reference import combine_ref, moe_ffn_ref, permute_ref, rank_ref, route_ref, unpermute_ref
from apexk.kernels.triton.routing import unpack

CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture
def layer(make_layer):
    return make_layer(T=4, topk=2, H=32, I=16, experts=4, slots=4, resident=4, dtype=torch.float16)


@pytest.mark.slow
def test_each_operator_passes_pytorchs_checks(layer):
    rows, offsets = grouped(layer)
    moved = torch.randn(rows.numel(), 32, device=rows.device).half()
    out = torch.empty(4, 32, dtype=torch.float16, device=rows.device)
    calls = {
        ops.route: (layer.ids, layer.slot_of, 4, 16),
        ops.rank: (layer.ids, layer.weights, 4),
        ops.permute: (layer.x, rows, 2),
        ops.unpermute: (moved, rows, layer.weights),
        ops.gated_gemm: (moved, layer.w13, offsets),
        ops.grouped_gemm: (moved[:, :16].contiguous(), layer.w2, offsets),
        ops.moe_ffn: (layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, layer.fresh_out()),
        ops.combine: (torch.randn(8, 32, device=rows.device), 2, out, layer.x),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def grouped(layer):
    routing = route_ref(layer.ids.cpu(), layer.slot_of.cpu(), 4)
    return routing.rows.to(layer.ids.device), routing.offsets.to(layer.ids.device)


def test_values_are_those_of_the_plain_functions(layer, close):
    rows, _ = grouped(layer)
    routing, ids = unpack(torch.ops.apexk.route(layer.ids, layer.slot_of, 4, 16), 8, 4, 4, 16)
    assert torch.equal(routing.rows, rows) and torch.equal(ids, layer.ids.flatten().int())
    ranked = torch.ops.apexk.rank(layer.ids, layer.weights, 4)
    for got, want in zip((ranked[0], ranked[1].view(torch.float32), ranked[2]), rank_ref(layer.ids, layer.weights, 4), strict=True):
        assert torch.equal(got, want)
    moved = torch.ops.apexk.permute(layer.x, rows, 2)
    assert torch.equal(moved, permute_ref(layer.x, rows, 2))
    back = torch.ops.apexk.unpermute(moved, rows, layer.weights)
    close(back, unpermute_ref(moved, rows, layer.weights, 4), torch.float16)  # a GPU fuses the product into the sum


@pytest.mark.slow
def test_a_layer_is_one_graph(layer, close):
    """torch.compile with fullgraph and torch.export both take a function that calls the operators."""

    def forward(x, ids, weights):
        pairs = x.new_empty(ids.numel(), x.shape[1], dtype=torch.float32)
        torch.ops.apexk.moe_ffn(x, layer.w13, layer.w2, ids, weights, layer.slot_of, pairs)
        out = torch.empty_like(x)
        torch.ops.apexk.combine(pairs, ids.shape[1], out, x)
        return out

    class Module(torch.nn.Module):
        def forward(self, x, ids, weights):
            return forward(x, ids, weights)

    pairs, want = layer.fresh_out().double(), torch.empty_like(layer.x)
    moe_ffn_ref(layer.x, layer.w13, layer.w2, layer.ids, layer.weights, layer.slot_of, pairs)
    combine_ref(pairs.float(), 2, want, layer.x)
    arguments = (layer.x, layer.ids, layer.weights)
    close(torch.compile(forward, backend="aot_eager", fullgraph=True)(*arguments), want, torch.float16)
    names = [str(node.target) for node in torch.export.export(Module(), arguments).graph.nodes]
    assert any("moe_ffn" in name for name in names) and any("combine" in name for name in names)
