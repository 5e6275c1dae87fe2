"""`dequantise`: one matrix of a slot's block out of an int8 or int4 payload (`apexk.store.quantised` says how it is packed)."""

import torch

from .checks import FLOATS, INT32_MAX, check, check_choice, check_launchable
from .reference import GROUP

BLOCK_G = {8: 32, 4: 64}  # of 4 warps, whose threads read 16 bytes of codes each


def dequantise(codes, scales, out, bits) -> None:
    """out[r, j] = code * scale of its group of 64; see `dequantise_ref`. One launch, on the current stream.

    codes int8 [n, G*64*bits/8], scales fp16 [n, G], out fp32, bf16 or fp16 [n, k] with G = ceil(k/64), bits 8 or 4.
    """
    check_choice("bits", bits, tuple(BLOCK_G))
    check("out", out, ("n", "k"), FLOATS)
    n, k = out.shape
    groups = -(-k // GROUP)
    check("scales", scales, (n, groups), (torch.float16,), like=out)
    check("codes", codes, (n, groups * GROUP * bits // 8), (torch.int8,), like=out)
    if n * groups > INT32_MAX:
        raise ValueError(f"out: {n} rows of {groups} groups, wanted at most {INT32_MAX} groups")
    check_launchable(out)
    if n and k:
        from .dequantise_kernels import _dequantise_kernel

        block = BLOCK_G[bits]
        _dequantise_kernel[(-(-n * groups // block),)](codes, scales, out, n, k, groups, BITS=bits, BLOCK_G=block, num_warps=4)
