"""`take_rows`: the CPU's rows out of mapped host memory into a layer's pairs, without a copy of the rows around them."""

import torch

from .checks import IDS, check, check_launchable, check_pairs

BLOCK_H = 1024  # 4 warps, 32 bytes a thread: many small reads in flight over the link


def take_rows(host, topk_ids, mark, pairs) -> None:
    """pairs[p] = host[p] for pairs of marked experts; see `take_rows_ref`. One launch.

    host and pairs fp32 [T*topk, H], topk_ids [T, topk], mark int32 [E] (-1: leave the expert's rows as they are). `host`
    and `mark` may be host memory that the device sees.
    """
    check("topk_ids", topk_ids, ("T", "topk"), IDS)
    check_pairs(*topk_ids.shape)
    check("pairs", pairs, (topk_ids.numel(), "H"), (torch.float32,), like=topk_ids)
    check("host", host, tuple(pairs.shape), (torch.float32,), like=topk_ids)
    check("mark", mark, ("E",), (torch.int32,), like=topk_ids)
    check_launchable(pairs)
    rows, hidden = pairs.shape
    if rows and hidden:
        from .take_rows_kernels import _take_rows_kernel

        block = min(BLOCK_H, max(16, 1 << (hidden - 1).bit_length()))
        _take_rows_kernel[(rows, -(-hidden // block))](host, topk_ids, mark, pairs, hidden, BLOCK_H=block, num_warps=4)
