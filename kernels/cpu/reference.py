"""The plain twin of `HostFFN.run`: one expert after another, in float64 unless told otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
}


def grouped_ffn_ref(
    x: torch.Tensor,  # [T, H]
    blocks: torch.Tensor,  # [E] int64 addresses of expert blocks
    topk_ids: torch.Tensor,  # [T, topk]
    topk_weights: torch.Tensor,  # [T, topk]
    experts: Iterable[int],
    out: torch.Tensor,  # [T*topk, H] float32
    *,
    intermediate: int,
    activation: str = "silu",
    compute_dtype: torch.dtype = torch.float64,
) -> None:
    """out[t*topk + k] = topk_weights[t, k] * W2(act(W1 x_t) * (W3 x_t)) for every pair whose expert is in `experts`.

    The activated rows are rounded to the weight dtype, as every kernel does (for float32: to float32).
    """
    hidden, topk = x.shape[1], topk_ids.shape[1]
    for expert in experts:
        pairs = (topk_ids.reshape(-1) == expert).nonzero().reshape(-1)
        if len(pairs) == 0:
            continue
        block = tensor_at(int(blocks[expert]), 3 * intermediate * hidden, x.dtype).to(compute_dtype)
        w13 = block[: 2 * intermediate * hidden].view(2 * intermediate, hidden)
        w2 = block[2 * intermediate * hidden :].view(hidden, intermediate)
        gate, up = (x[pairs // topk].to(compute_dtype) @ w13.T).chunk(2, dim=-1)
        h = ACTIVATIONS[activation](gate, up).to(x.dtype).to(compute_dtype)
        out[pairs] = (topk_weights.reshape(-1)[pairs, None].to(compute_dtype) * (h @ w2.T)).to(out.dtype)


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements at `address`, without a copy; the memory must outlive the tensor."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
