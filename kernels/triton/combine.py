"""`combine`: the pairs' rows, another device's partial sum and the shared expert's output into the layer's output."""

import torch

from .checks import FLOATS, IDS, check, check_launchable, check_pairs

BLOCK_H = 256  # a token of 2048 is then 8 blocks: decode has few tokens and many processors


def combine(pairs, topk, out, shared=None, *, topk_ids=None, slot_of=None, partial=None) -> None:
    """pairs fp32 [T*topk, H] -> out [T, H], summed over k in order; see `combine_ref` for the optional parts. One launch."""
    check("out", out, ("T", "H"), FLOATS, rows_contiguous=True)
    tokens, hidden = out.shape
    check_pairs(tokens, topk)
    check("pairs", pairs, (tokens * topk, hidden), (torch.float32,), like=out)
    if topk_ids is not None:
        check("topk_ids", topk_ids, (tokens, topk), IDS, like=out)
    if slot_of is not None:
        if topk_ids is None:
            raise ValueError("slot_of: came without topk_ids, wanted both")
        check("slot_of", slot_of, ("E",), (torch.int32,), like=out)
    for name, extra in (("partial", partial), ("shared", shared)):
        if extra is not None:
            check(name, extra, (tokens, hidden), FLOATS, like=out, rows_contiguous=True)
    check_launchable(out)
    if tokens == 0 or hidden == 0:
        return
    from .combine_kernels import _combine_kernel

    block = min(BLOCK_H, max(16, 1 << (hidden - 1).bit_length()))
    _combine_kernel[(tokens, -(-hidden // block))](
        pairs, topk_ids, slot_of, partial, shared, out, hidden, _stride(partial), _stride(shared), out.stride(0),
        TOPK=topk, BLOCK_H=block, num_warps=2,
    )  # fmt: skip


def _stride(tensor) -> int:
    return 0 if tensor is None else tensor.stride(0)
