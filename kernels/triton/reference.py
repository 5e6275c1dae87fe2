"""What every kernel of this room computes, in plain torch: the twin of each public function, with the same arguments.

Nothing here imports Triton, so a machine without it can use the twins (the virtual device runs them as its GPU half).
Products are taken in `compute_dtype`, float64 unless asked otherwise; the activation between the two products is rounded
to the weights' dtype, as the kernels and the CPU path do, and float32 weights are therefore never rounded.

Shapes: T tokens, topk experts a token, E experts, S slots, H hidden width, I intermediate width. A *pair* is one chosen
expert of one token and has the index t*topk + k. A pair whose expert id is -1 is padding and belongs to nobody.
"""

from dataclasses import dataclass

import torch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oss")
SCORE_SCALE = 1 << 24  # scores are summed as integers of this resolution, so that no order of adding changes the sum
GROUP = 64  # weights of a row that share a scale
OSS_ALPHA, OSS_LIMIT = 1.702, 7.0  # gpt-oss: gate*sigmoid(alpha*gate) * (up+1), both clamped to the limit


@dataclass
class Routing:
    """Pairs grouped by slot (or by expert, where the slot table is the identity)."""

    loads: torch.Tensor  # int32 [E], pairs of each expert, whatever the slot table says
    offsets: torch.Tensor  # int32 [S+1], group s holds rows[offsets[s]:offsets[s+1]]
    rows: torch.Tensor  # int32 [n], pair indices sorted by (group, pair); a kernel returns [T*topk], -1 past the last
    tile_group: torch.Tensor | None = None  # int32 [tiles], group of each tile, -1 for none; made by kernels only
    tile_row: torch.Tensor | None = None  # int32 [tiles], the tile's first index into rows
    block_m: int = 0  # rows of a tile


def route_ref(topk_ids, slot_of, num_slots) -> Routing:
    """topk_ids int [T, topk]; slot_of int32 [E], -1 where the expert has no part in this phase."""
    ids = topk_ids.reshape(-1).long()
    num_experts = slot_of.numel()
    real = ids >= 0
    loads = torch.bincount(ids[real], minlength=num_experts).to(torch.int32)
    slots = torch.full_like(ids, -1)
    slots[real] = slot_of.long()[ids[real]]
    pairs = torch.nonzero(slots >= 0).flatten()
    slots = slots[pairs]
    rows = pairs[torch.sort(slots, stable=True).indices].to(torch.int32)
    counts = torch.bincount(slots, minlength=num_slots)
    offsets = torch.zeros(num_slots + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = torch.cumsum(counts, 0)
    return Routing(loads, offsets, rows)


def rank_ref(topk_ids, topk_weights, num_experts):
    """Loads int32 [E], summed weights fp32 [E], and the experts by (load down, score down, id up) int32 [E]."""
    ids = topk_ids.reshape(-1).long()
    real = ids >= 0
    loads = torch.bincount(ids[real], minlength=num_experts)
    parts = (topk_weights.reshape(-1)[real].float() * SCORE_SCALE).to(torch.int64)
    sums = torch.zeros(num_experts, dtype=torch.int64, device=ids.device).index_add_(0, ids[real], parts)
    scores = sums.float() / SCORE_SCALE
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(loads[order], descending=True, stable=True).indices]
    return loads.to(torch.int32), scores, order.to(torch.int32)


def permute_ref(x, rows, topk):
    """x [T, H], rows int32 [n] -> [n, H]: the token of each pair, in the order of rows."""
    return x[rows.long() // topk]


def unpermute_ref(y, rows, topk_weights, T):
    """y [n, H], topk_weights fp32 [T, topk] -> [T, H]: each token's weighted sum over its pairs in rows, k upwards."""
    topk = topk_weights.shape[1]
    pairs = torch.zeros(T * topk, y.shape[1], dtype=torch.float32, device=y.device)
    pairs[rows.long()] = y.float() * topk_weights.reshape(-1)[rows.long()].float()[:, None]
    out = torch.empty(T, y.shape[1], dtype=y.dtype, device=y.device)
    combine_ref(pairs, topk, out)
    return out


def activation_ref(gate, up, activation="silu"):
    """act(gate) * up, in the dtype that came; gpt-oss clamps both and multiplies by up + 1."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    if activation == "swiglu_oss":
        gate, up = gate.clamp(max=OSS_LIMIT), up.clamp(-OSS_LIMIT, OSS_LIMIT)
        return gate * torch.sigmoid(OSS_ALPHA * gate) * (up + 1)
    raise ValueError(f"activation {activation!r} is not known; known: {', '.join(ACTIVATIONS)}")


def grouped_gemm_ref(x, w, offsets, *, bias=None, compute_dtype=torch.float64):
    """x [n, K] in group order, w [S, N, K] (any slot stride), offsets int32 [S+1] -> [n, N] in x's dtype."""
    out = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    for slot, rows in _groups(offsets):
        out[rows] = _product(x[rows], w[slot], None if bias is None else bias[slot], compute_dtype).to(x.dtype)
    return out


def gated_gemm_ref(x, w13, offsets, activation="silu", *, bias=None, compute_dtype=torch.float64):
    """x [n, H] in group order, w13 [S, 2I, H] (gate rows, then up rows) -> act(gate) * up [n, I] in x's dtype."""
    inter = w13.shape[1] // 2
    out = torch.empty(x.shape[0], inter, dtype=x.dtype, device=x.device)
    for slot, rows in _groups(offsets):
        both = _product(x[rows], w13[slot], None if bias is None else bias[slot], compute_dtype)
        out[rows] = activation_ref(both[:, :inter], both[:, inter:], activation).to(x.dtype)
    return out


def moe_ffn_ref(x, w13, w2, topk_ids, topk_weights, slot_of, out, *, activation="silu", b13=None, b2=None,
                weight_on_input=False, compute_dtype=torch.float64) -> None:
    """out[t*topk + k] = weight * (w2 @ h), h = act(gate) * up of token t, for each pair whose expert has a slot.

    x [T, H], w13 [S, 2I, H], w2 [S, H, I], topk_ids [T, topk], topk_weights fp32 [T, topk], slot_of int32 [E],
    out fp32 [T*topk, H]. Rows of other pairs are left as they are: phases with disjoint experts fill one `out`.
    With `weight_on_input` the weight multiplies x instead, and the product is rounded to x's dtype.
    """
    topk = topk_ids.shape[1]
    inter = w2.shape[2]
    routing = route_ref(topk_ids, slot_of, w13.shape[0])
    flat_weights = topk_weights.reshape(-1).to(compute_dtype)
    for slot, rows in _groups(routing.offsets):
        pairs = routing.rows[rows].long()
        rows_in = x[pairs // topk]
        if weight_on_input:
            rows_in = (rows_in.float() * topk_weights.reshape(-1)[pairs, None]).to(x.dtype)
        both = _product(rows_in, w13[slot], None if b13 is None else b13[slot], compute_dtype)
        h = activation_ref(both[:, :inter], both[:, inter:], activation)
        if w2.dtype != torch.float32:
            h = h.to(w2.dtype)
        y = _product(h, w2[slot], None if b2 is None else b2[slot], compute_dtype)
        out[pairs] = (y if weight_on_input else y * flat_weights[pairs, None]).to(out.dtype)


def take_rows_ref(host, topk_ids, mark, pairs) -> None:
    """pairs[p] = host[p], fp32 [T*topk, H] each, for pairs whose expert has mark int32 [E] >= 0; ids of -1 have no expert."""
    ids = topk_ids.reshape(-1).long()
    taken = (ids >= 0) & (mark[ids.clamp(min=0)] >= 0)
    pairs[taken] = host[taken]


def dequantise_ref(codes, scales, out, bits) -> None:
    """out[r, j] = code of weight j of row r, times the fp16 scale of its group of 64, in fp32, rounded to out's dtype.

    codes int8 [n, G*64*bits/8], scales fp16 [n, G], out [n, k] with G = ceil(k/64), bits 8 or 4. With 4 bits, byte j of a group
    holds code j in its low half and code j+32 in its high half; codes behind k are not read into anything.
    """
    n, k = out.shape
    codes = codes.view(n, scales.shape[1], -1)
    if bits == 4:
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], -1)
    out.copy_((codes.float() * scales.float()[..., None]).view(n, -1)[:, :k])


def combine_ref(pairs, topk, out, shared=None, *, topk_ids=None, slot_of=None, partial=None) -> None:
    """out[t] = sum over k of pairs[t*topk + k], in fp32 and in that order, then + partial, then + shared, then cast.

    pairs fp32 [T*topk, H], out [T, H], shared [T, H], partial [T, H] (what another device summed already).
    With topk_ids, pairs of id -1 count as absent; with slot_of too, so do pairs whose expert has no slot. Absent rows
    are not read. Without topk_ids every row must hold a value.
    """
    rows = pairs.reshape(out.shape[0], topk, out.shape[1])
    present = None
    if topk_ids is not None:
        present = topk_ids >= 0
        if slot_of is not None:
            present &= slot_of.long()[topk_ids.long().clamp(min=0)] >= 0
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(topk):
        row = rows[:, k].float()
        total += row if present is None else torch.where(present[:, k, None], row, 0.0)
    for extra in (partial, shared):
        if extra is not None:
            total += extra.float()
    out.copy_(total)


def _groups(offsets):
    """(slot, slice of its rows) of every slot that has any."""
    ends = offsets.tolist()
    return [(s, slice(ends[s], ends[s + 1])) for s in range(len(ends) - 1) if ends[s + 1] > ends[s]]


def _product(x, w, bias, compute_dtype):
    y = x.to(compute_dtype) @ w.to(compute_dtype).T
    return y if bias is None else y + bias.to(compute_dtype)
