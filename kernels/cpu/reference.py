"""The plain twins of `HostFFN.run`, one expert after another, and of `linear`; in float64 unless told otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_oss": lambda gate, up: _swiglu_oss(gate.clamp(max=7.0), up.clamp(-7.0, 7.0)),
}


def _swiglu_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def grouped_ffn_ref(
    x: torch.Tensor,  # [T, H]
    blocks: torch.Tensor,  # [E] int64 addresses of expert blocks
    topk_ids: torch.Tensor,  # [T, topk]
    topk_weights: torch.Tensor,  # [T, topk]
    experts: Iterable[int],
    out: torch.Tensor,  # [T*topk, H] float32; [T, H] if summed
    *,
    intermediate: int,
    activation: str = "silu",
    biases: bool = False,
    weight_on_input: bool = False,
    summed: bool = False,
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """out[t*topk + k] = topk_weights[t, k] * W2(act(W1 x_t) * (W3 x_t)) for every pair whose expert is in `experts`.

    A block holds w13 [2I, H] (gate rows, then up rows), w2 [H, I] and, with `biases`, b13 [2I] and b2 [H]. The activated
    rows are rounded to the weight dtype, as every kernel does (for float32: to float32). `weight_on_input` multiplies
    x_t instead of the result, rounded to its dtype. `summed`: out[t] is the sum over k, 0 where there is no such pair.
    """
    hidden, topk = x.shape[1], topk_ids.shape[1]
    if summed:
        rows = torch.zeros(topk_ids.numel(), hidden, dtype=compute_dtype)
        grouped_ffn_ref(
            x, blocks, topk_ids, topk_weights, experts, rows,
            intermediate=intermediate, activation=activation, biases=biases, weight_on_input=weight_on_input, compute_dtype=compute_dtype,
        )  # fmt: skip
        out.copy_(rows.view(*topk_ids.shape, hidden).sum(dim=1))
        return
    sizes = [2 * intermediate * hidden, hidden * intermediate] + [2 * intermediate, hidden] * biases
    for expert in experts:
        pairs = (topk_ids.reshape(-1) == expert).nonzero().reshape(-1)
        if len(pairs) == 0:
            continue
        block = tensor_at(int(blocks[expert]), sum(sizes), x.dtype).to(compute_dtype)
        w13, w2, *bias = block.split(sizes)
        b13, b2 = bias or (0.0, 0.0)
        weight = topk_weights.reshape(-1)[pairs, None].to(compute_dtype)
        rows = x[pairs // topk].to(compute_dtype)
        if weight_on_input:
            rows, weight = (rows * weight).to(x.dtype).to(compute_dtype), 1.0
        gate, up = (rows @ w13.view(2 * intermediate, hidden).T + b13).chunk(2, dim=-1)
        h = ACTIVATIONS[activation](gate, up).to(x.dtype).to(compute_dtype)
        out[pairs] = (weight * (h @ w2.view(hidden, intermediate).T + b2)).to(out.dtype)


def linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """y[t] = weight x_t + bias of x [T, K], weight [N, K] and bias [N], not rounded: [T, N] of `compute_dtype`."""
    y = x.to(compute_dtype) @ weight.to(compute_dtype).T
    return y if bias is None else y + bias.to(compute_dtype)


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements at `address`, without a copy; the memory must outlive the tensor."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
