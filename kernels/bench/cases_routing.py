"""Routing and ranking: tiny data, so the figure is latency; the percentage of the memory roof is low by nature."""

import torch

from apexk.kernels.triton.reference import rank_ref, route_ref
from apexk.kernels.triton.routing import rank, route, routing_ints
from apexk.kernels.triton.shapes import MODELS

from .inputs import drawn_ids
from .registry import Call, Case

TOKENS = (1, 32, 4096)
BLOCK_M = 16


def cases():
    for model in ("qwen3.5-35b-a3b", "qwen3-next-80b"):
        for tokens in TOKENS:
            for op, build in (("routing", _route), ("ranking", _rank)):
                yield _case(op, build, model, tokens)


def _case(op, build, model, tokens):
    def make(device):
        ids, weights = (t.to(device) for t in drawn_ids(MODELS[model], tokens))
        return build(MODELS[model], ids, weights)

    return Case(op, "triton", "cuda", torch.float32, {"model": model, "tokens": tokens}, make)


def _route(shape, ids, weights):
    out = torch.empty(routing_ints(ids.numel(), shape.experts, shape.experts, BLOCK_M), dtype=torch.int32, device=ids.device)

    def error():
        want = route_ref(ids, torch.arange(shape.experts, dtype=torch.int32, device=ids.device), shape.experts)
        got = route(ids, None, shape.experts, block_m=BLOCK_M)
        return 0.0 if torch.equal(got.rows, want.rows) and torch.equal(got.offsets, want.offsets) else float("inf")

    return Call(lambda: route(ids, None, shape.experts, block_m=BLOCK_M, out=out), error, 0, ids.numel() * 8 + out.numel() * 4)


def _rank(shape, ids, weights):
    out = torch.empty(3, shape.experts, dtype=torch.int32, device=ids.device)

    def error():
        pairs = zip(rank(ids, weights, shape.experts), rank_ref(ids, weights, shape.experts), strict=True)
        return 0.0 if all(torch.equal(got, want) for got, want in pairs) else float("inf")

    return Call(lambda: rank(ids, weights, shape.experts, out=out), error, 0, ids.numel() * 12 + out.numel() * 4)
