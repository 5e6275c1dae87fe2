"""How a tensor's values are stored: plain, in FP8 with a scale a block, or in MXFP4; and how they come back in full.

FP8 (`quant_method: fp8`, as DeepSeek-V3 and Qwen3 are released): `W [.., R, C]` in float8 and `W_scale_inv [.., r, c]`, a
scale for every block of the configuration's `weight_block_size` (128 x 128), the last row and column of blocks being cut
off where R or C is no multiple. Value = stored value * scale, in float32, then rounded to the weight dtype.

MXFP4 (`quant_method: mxfp4`, as gpt-oss is released): `W_blocks [E, R, G, 16]` bytes, two 4-bit values each (low half
first), 32 in a group, and `W_scales [E, R, G]`: the group's exponent + 127. The parameter is the transpose `[E, 32G, R]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from apexk.hf.loader.headers import CheckpointError, Stored

#: the sixteen values of E2M1: sign, two bits of exponent, one of mantissa
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
METHODS = ("fp8", "mxfp4")
Read = Callable[[Stored, int, int], torch.Tensor]  # rows [begin, end) of a stored tensor along its first dimension


@dataclass(frozen=True)
class Tensor:
    """A tensor as the model knows it: `name`, `shape`, and `parts`, the stored tensors that its values come from."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    kind: str = "plain"  # or "fp8", "mxfp4"
    block: tuple[int, int] | None = None

    @property
    def first(self) -> Stored:
        return self.parts[0]

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""
        return self.parts[0].nbytes if len(self.parts) == 1 else sum(part.nbytes for part in self.parts)

    def values(self, read: Read, dtype: torch.dtype | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Its values in `dtype`; plain ones as stored where that is None. `rows`: those alone, along the first dimension."""
        begin, end = rows or (0, self.shape[0] if self.shape else 1)
        if rows and self.kind == "fp8" and len(self.shape) == 2:  # a block's scale spans rows: whole blocks are read
            high = self.block[0]
            first, last = begin // high, -(-end // high)
            weights, scales = read(self.parts[0], first * high, min(last * high, self.shape[0])), self._finite(read(self.parts[1], first, last))
            return dequantize_fp8(weights, scales, self.block, dtype or torch.bfloat16)[begin - first * high : end - first * high]
        parts = [read(part, begin, end if rows else part.shape[0] if part.shape else 1) for part in self.parts]
        if self.kind == "plain":
            return parts[0] if dtype is None else parts[0].to(dtype)
        self._finite(parts[1])
        if self.kind == "fp8":
            return dequantize_fp8(*parts, self.block, dtype or torch.bfloat16)
        return dequantize_mxfp4(*parts, dtype or torch.bfloat16).transpose(1, 2)

    def _finite(self, scales: torch.Tensor) -> torch.Tensor:
        """Raises `CheckpointError` for scales that make no numbers; of MXFP4 that is the exponent 255."""
        if bool((scales == 255).any() if self.kind == "mxfp4" else not scales.float().isfinite().all()):
            raise CheckpointError(f"{self.parts[1].name} in {self.parts[1].file.name} holds scales that are not finite")
        return scales


def dequantize_fp8(weights: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """`[.., R, C]` float8 and `[.., ceil(R/block), ceil(C/block)]` scales -> `[.., R, C]` in `dtype`."""
    rows, columns = weights.shape[-2:]
    spread = scales.float().repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return spread.mul_(weights.float()).to(dtype)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[E, R, G, 16]` bytes and `[E, R, G]` exponents + 127 -> `[E, R, 32G]` in `dtype`."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float32)
    pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1)  # [E, R, G, 16, 2]
    values = torch.ldexp(pairs.flatten(-2), scales.int().unsqueeze(-1) - 127)
    return values.to(dtype).flatten(-2)


def tensors(stored: dict[str, Stored], quantization: dict | None) -> list[Tensor]:
    """The checkpoint's tensors with their scales joined to them. `quantization`: the configuration's `quantization_config`."""
    method = (quantization or {}).get("quant_method")
    if quantization and method not in METHODS:
        raise CheckpointError(f"the checkpoint is quantised by {method!r}; apexk reads unquantised ones and {', '.join(METHODS)}")
    taken: set[str] = set()
    found = []
    for name, item in stored.items():
        if item.dtype in FLOAT8:
            scales = _partner(stored, name, f"{name}_scale_inv", item, method, "fp8")
            found.append(_fp8(item, scales, (quantization or {}).get("weight_block_size")))
            taken.add(scales.name)
        elif name.endswith("_blocks") and method == "mxfp4":
            scales = _partner(stored, name, name.removesuffix("_blocks") + "_scales", item, method, "mxfp4")
            found.append(_mxfp4(item, scales))
            taken.add(scales.name)
        else:
            found.append(Tensor(name, item.shape, (item,)))
    return [tensor for tensor in found if tensor.name not in taken]


def _partner(stored: dict[str, Stored], name: str, wanted: str, item: Stored, method: str | None, kind: str) -> Stored:
    if method != kind:
        raise CheckpointError(f"{name} is {item.dtype}, but the configuration's quantization_config does not say {kind!r}")
    if wanted not in stored:
        raise CheckpointError(f"{name} is {item.dtype}, but its scales {wanted} are missing")
    return stored[wanted]


def _fp8(item: Stored, scales: Stored, block) -> Tensor:
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(f"{item.name} is {item.dtype}; wanted a weight_block_size [rows, columns] in quantization_config, got {block!r}")
    *lead, rows, columns = item.shape
    wanted = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != wanted:
        raise CheckpointError(f"{scales.name} has shape {list(scales.shape)}; {item.name} of {list(item.shape)} in blocks of {list(block)} wants {list(wanted)}")
    return Tensor(item.name, item.shape, (item, scales), "fp8", tuple(block))


def _mxfp4(item: Stored, scales: Stored) -> Tensor:
    if len(item.shape) != 4 or item.shape[-1] != 16 or item.dtype != torch.uint8 or scales.shape != item.shape[:-1] or scales.dtype != torch.uint8:
        raise CheckpointError(f"{item.name} {list(item.shape)} {item.dtype} and {scales.name} {list(scales.shape)} {scales.dtype}: "
                              "wanted bytes [experts, rows, groups, 16] and [experts, rows, groups]")
    experts, rows, groups, _ = item.shape
    return Tensor(item.name.removesuffix("_blocks"), (experts, 32 * groups, rows), (item, scales), "mxfp4")
