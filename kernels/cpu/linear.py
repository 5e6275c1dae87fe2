"""A linear layer on a `HostFFN`'s threads: `linear` checks and computes; `unfit` and `compute` are its halves, for a caller
that has another way where a call does not fit."""

from __future__ import annotations

from ctypes import byref

import torch

from . import library as lib
from .ffn import DTYPES, HostFFN, raise_for


def linear(ffn: HostFFN, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, with_torch: bool = False) -> torch.Tensor:
    """y[t] = weight x_t + bias: sums in float32, rounded once to x's dtype.

    x [T, K], rows contiguous, as far apart as they like; weight [N, K] and bias [N] contiguous; all bf16, fp16 or fp32, on
    the CPU. Gives [T, N]. No gradient goes through it. T may be 0, N and K may not. The same bits for any number of threads
    and whatever the other rows are; they depend on the instruction set. `with_torch` as in `HostFFN.run`.
    Raises ValueError or TypeError where something does not fit.
    """
    error = unfit(x, weight, bias)
    if error is not None:
        raise error
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    compute(ffn, x, weight, bias, y, with_torch=with_torch)
    return y


def unfit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Exception | None:
    """What `linear` raises for these, None where they fit."""
    given = (x, weight) if bias is None else (x, weight, bias)
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            return TypeError(f"x, weight and bias must be tensors, got {type(tensor).__name__}")
        if not tensor.is_cpu:
            return ValueError(f"x, weight and bias must be on the CPU, got {tensor.device}")
        if tensor.dtype is not x.dtype or tensor.dtype not in DTYPES:
            return TypeError(f"x, weight and bias must be all of one of {', '.join(map(str, DTYPES))}, got {', '.join(str(t.dtype) for t in given)}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        return ValueError(f"wanted x [T, K] and weight [N, K] of at least one row and column, got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        return ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not weight.is_contiguous() or bias is not None and not bias.is_contiguous():
        return ValueError(f"weight and bias must be contiguous, got strides {weight.stride()}{'' if bias is None else f' and {bias.stride()}'}")
    if not x.is_contiguous() and (x.stride(1) != 1 and x.shape[1] > 1 or x.shape[0] > 1 and x.stride(0) < x.shape[1]):
        return ValueError(f"x must have contiguous rows that do not overlap, got strides {x.stride()}")
    return None


def compute(ffn: HostFFN, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, *, with_torch: bool = False) -> None:
    """`linear` of what has been found to fit, into `y`: contiguous, of x's dtype, T x N elements in whatever shape."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    # in the order of the struct's fields
    call = lib.LinearCall(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
                          tokens, max(x.stride(0), inputs), inputs, outputs, DTYPES[x.dtype])  # fmt: skip
    raise_for(ffn.call_linear(byref(call), with_torch))
