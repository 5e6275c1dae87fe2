"""Checks at the boundary of the public functions: each names the argument, what came and what was wanted."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1


def check(name, tensor, shape, dtypes, *, like=None, rows_contiguous=False):
    """Rank, sizes, dtype and device of one tensor.

    `shape` holds a size, or a letter for a free one. Contiguous is wanted, or, with `rows_contiguous`, only a last axis
    of stride 1. `like` is the tensor whose device this one must share.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a tensor of shape {_shape(shape)}")
    fits = tensor.dim() == len(shape) and all(isinstance(w, str) or n == w for n, w in zip(tensor.shape, shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: got shape {_shape(tensor.shape)}, wanted {_shape(shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {' or '.join(str(d) for d in dtypes)}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: is on {tensor.device}, wanted {like.device} where the first argument is")
    if rows_contiguous:
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: its last axis has stride {tensor.stride(-1)}, wanted 1")
    elif not tensor.is_contiguous():
        raise ValueError(f"{name}: strides are {tuple(tensor.stride())}, wanted a contiguous tensor")


def check_weights(name, w, shape, like):
    """Expert weights [S, N, K] inside a pool: rows adjacent within an expert, any distance between experts."""
    check(name, w, shape, (like.dtype,), like=like, rows_contiguous=True)
    if w.numel() and w.stride(1) != w.shape[2]:
        raise ValueError(f"{name}: rows of one expert are {w.stride(1)} elements apart, wanted {w.shape[2]}")


def check_pairs(tokens, topk):
    """Pair indices are int32 on the device."""
    if tokens * topk > INT32_MAX:
        raise ValueError(f"T*topk = {tokens * topk} pairs, wanted at most {INT32_MAX}")


def check_choice(name, value, known):
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(map(str, known))}")


def check_launchable(tensor):
    """A GPU, or Triton's interpreter, must be able to touch this tensor; "meta" ones are for recording launches only."""
    if tensor.is_cuda or tensor.is_meta:
        return
    import triton

    if not triton.knobs.runtime.interpret:
        raise ValueError(
            f"tensors are on {tensor.device}, wanted a CUDA device; for CPU tensors use the function of the same name "
            "ending in _ref, or set TRITON_INTERPRET=1 before Triton is imported"
        )


def _shape(shape):
    return "[" + ", ".join(str(n) for n in shape) + "]"
