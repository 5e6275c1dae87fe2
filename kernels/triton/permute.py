"""`permute` gathers token rows into expert order, `unpermute` is its inverse with the weighted sum over topk."""

import torch

from .checks import FLOATS, check, check_launchable, check_pairs

BLOCK_H = 512  # 4 warps, 16 bytes a thread in half precision
BLOCK_ROWS = 256


def permute(x, rows, topk, *, out=None):
    """x [T, H], rows int32 [n] (pair indices, -1 for none) -> [n, H]; see `permute_ref`. Rows of -1 are not written."""
    check("x", x, ("T", "H"), FLOATS, rows_contiguous=True)
    check("rows", rows, ("n",), (torch.int32,), like=x)
    if topk < 1:
        raise ValueError(f"topk = {topk}, wanted at least 1")
    n, hidden = rows.numel(), x.shape[1]
    if out is None:
        out = torch.empty(n, hidden, dtype=x.dtype, device=x.device)
    check("out", out, (n, hidden), (x.dtype,), like=x)
    check_launchable(x)
    if n and hidden:
        from .permute_kernels import _permute_kernel

        block = _block(hidden)
        _permute_kernel[(n, -(-hidden // block))](x, rows, out, hidden, x.stride(0), TOPK=topk, BLOCK_H=block, num_warps=4)
    return out


def unpermute(y, rows, topk_weights, T, *, out=None):
    """y [n, H], rows int32 [n], topk_weights fp32 [T, topk] -> [T, H]; see `unpermute_ref`. Two launches and a fill."""
    check("y", y, ("n", "H"), FLOATS, rows_contiguous=True)
    check("rows", rows, (y.shape[0],), (torch.int32,), like=y)
    check("topk_weights", topk_weights, (T, "topk"), (torch.float32,), like=y)
    check_pairs(*topk_weights.shape)
    n, hidden = y.shape
    if out is None:
        out = torch.empty(T, hidden, dtype=y.dtype, device=y.device)
    check("out", out, (T, hidden), (y.dtype,), like=y)
    check_launchable(y)
    if T and hidden:
        from .permute_kernels import _invert_kernel, _unpermute_kernel

        place = torch.full((topk_weights.numel(),), -1, dtype=torch.int32, device=y.device)
        if n:
            _invert_kernel[(-(-n // BLOCK_ROWS),)](rows, place, n, BLOCK=BLOCK_ROWS, num_warps=4)
        block = _block(hidden)
        _unpermute_kernel[(T, -(-hidden // block))](
            y, place, topk_weights, out, hidden, y.stride(0), TOPK=topk_weights.shape[1], BLOCK_H=block, num_warps=4
        )
    return out


def _block(hidden) -> int:
    return min(BLOCK_H, max(16, 1 << (hidden - 1).bit_length()))
