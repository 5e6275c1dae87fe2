"""A linear layer on a `HostFFN`'s threads: `linear`, and `Prepared` for a weight that many calls of few rows are made with."""

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
    _check(x, weight, bias)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device="cpu")
    call = _call(weight, bias)
    call.x, call.y, call.tokens, call.x_stride = x.data_ptr(), y.data_ptr(), x.shape[0], max(x.stride(0), x.shape[1])
    raise_for(ffn.call_linear(byref(call), with_torch))
    return y


class Prepared:
    """`linear` with one weight and bias, which are checked here, once; a call costs half as much Python. One call at a time.

    The memory of weight and bias must still be there at a call: `holds` tells. Raises as `linear` does.
    """

    def __init__(self, ffn: HostFFN, weight: torch.Tensor, bias: torch.Tensor | None = None, *, with_torch: bool = False):
        _check(None, weight, bias)
        self._ffn, self._with_torch = ffn, with_torch
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self._held = _described(weight), bias is not None and _described(bias)
        self._native = _call(weight, bias)
        self._reference = byref(self._native)

    def holds(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether these lie where the prepared ones do, in the same form."""
        return (_described(weight), bias is not None and _described(bias)) == self._held

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Fills y [..., N] from x [..., K], both contiguous, of the weight's dtype and on the CPU: not checked."""
        native = self._native
        native.x, native.y, native.tokens = x.data_ptr(), y.data_ptr(), x.numel() // self.inputs
        raise_for(self._ffn.call_linear(self._reference, self._with_torch))


def _described(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()


def _call(weight: torch.Tensor, bias: torch.Tensor | None) -> lib.LinearCall:
    """All but the rows."""
    outputs, inputs = weight.shape
    return lib.LinearCall(weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(), x_stride=inputs, inputs=inputs,
                          outputs=outputs, dtype=DTYPES[weight.dtype])  # fmt: skip


def _check(x: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"x, weight and bias must be tensors, got {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise ValueError(f"x, weight and bias must be on the CPU, got {tensor.device}")
        if tensor.dtype is not weight.dtype or tensor.dtype not in DTYPES:
            raise TypeError(f"x, weight and bias must be all of one of {', '.join(map(str, DTYPES))}, got {', '.join(str(t.dtype) for t in given)}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [N, K] of at least one row and column, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not weight.is_contiguous() or bias is not None and not bias.is_contiguous():
        raise ValueError(f"weight and bias must be contiguous, got strides {weight.stride()}{'' if bias is None else f' and {bias.stride()}'}")
    if x is None:
        return
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [T, K] for a weight {tuple(weight.shape)}, got {tuple(x.shape)}")
    if x.stride(1) != 1 and x.shape[1] > 1 or x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        raise ValueError(f"x must have contiguous rows that do not overlap, got strides {x.stride()}")
