"""Expert blocks with fewer bits for the transfer: one contiguous payload `[codes | fp16 scales]`. Lossy.

Each row of `w13 [2I, H]` and `w2 [H, I]` is cut along its length k into groups of 64 (the last one shorter where 64 does not
divide k). With Q = 127 (`int8`) or 7 (`int4`), a group with largest magnitude a has

    scale s = fp16(a / Q)      code c = clamp(round_half_even(w / s), -Q, Q), 0 where s is 0      w' = dtype(c * s)

Divisions are fp32, c * s is exact in fp32, and w' is rounded to the weight dtype once. So |w' - w| is at most
s/2 + Q*max(s/2^11, 2^-25), the second term from rounding s, beside that last rounding.

Codes of a row fill whole groups, zeros behind k: `int8` has a byte a code; `int4` has codes j and j+32 of a group in the low and
the high half of its byte j, as two's complement. A payload is `w13 codes [2I, G*B] | w2 codes | w13 scales [2I, G] | w2 scales`,
G groups a row, B = 64 or 32 bytes a group, then the biases as they are; each part starts at a multiple of 16 bytes, payloads at
multiples of 4 KiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from apexk.kernels.triton.reference import GROUP, dequantise_ref
from apexk.store.block import ALIGN_BYTES, ExpertBlock

#: name of a payload -> bits of a code
BITS = {"int8": 8, "int4": 4}
PART_BYTES = 16  # the widest read of a GPU thread
LARGEST = 2.0**15  # of a weight: scales and values then stay finite in fp16


@dataclass(frozen=True)
class Payload:
    """How a `block` travels as `name`, "int8" or "int4"."""

    block: ExpertBlock
    name: str

    def __post_init__(self):
        if self.name not in BITS:
            raise ValueError(f"payload is {self.name!r}; there are {', '.join(BITS)}")

    @property
    def bits(self) -> int:
        return BITS[self.name]

    @property
    def parts(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """Where a payload's parts lie: name -> (first byte, shape, dtype)."""
        shapes = {name: shape for name, shape in self.block.shapes.items() if len(shape) == 2}
        wanted = {f"{name}.codes": ((n, groups(k) * GROUP * self.bits // 8), torch.int8) for name, (n, k) in shapes.items()}
        wanted |= {f"{name}.scales": ((n, groups(k)), torch.float16) for name, (n, k) in shapes.items()}
        wanted |= {name: (shape, self.block.dtype) for name, shape in self.block.shapes.items() if name not in shapes}
        found, start = {}, 0
        for name, (shape, dtype) in wanted.items():
            found[name] = (start, shape, dtype)
            start = _up(start + math.prod(shape) * dtype.itemsize, PART_BYTES)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that one copy moves."""
        start, shape, dtype = list(self.parts.values())[-1]
        return start + math.prod(shape) * dtype.itemsize

    @property
    def stride_bytes(self) -> int:
        """Distance between payloads, a multiple of 4 KiB."""
        return _up(self.nbytes, ALIGN_BYTES)

    @property
    def ratio(self) -> float:
        """Its bytes over the plain block's."""
        return self.nbytes / self.block.payload_bytes

    def view(self, part: str, payload: torch.Tensor) -> torch.Tensor:
        """A part of one payload, uint8 `[nbytes]` or longer."""
        start, shape, dtype = self.parts[part]
        return payload[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def pack(self, block: torch.Tensor, payload: torch.Tensor) -> None:
        """One block `[stride]` of the weight dtype -> its payload, uint8 `[nbytes]` or longer. ValueError for a weight that is
        not finite or above 2^15."""
        for name in self.block.shapes:
            values = self.block.view(name, block[None])[0]
            if name in self.parts:
                self.view(name, payload).copy_(values)
                continue
            codes, scales = quantise(values, self.bits, name)
            self.view(f"{name}.codes", payload).copy_(codes)
            self.view(f"{name}.scales", payload).copy_(scales)

    def check(self, blocks: torch.Tensor, where: str) -> None:
        """ValueError, naming `where`, unless every one of the blocks `[n, stride]` can be packed."""
        for name in self.block.shapes:
            if name not in self.parts:
                _check_range(self.block.view(name, blocks), f"{where}, {name}")

    def unpack(self, payload: torch.Tensor, block: torch.Tensor, dequantise=dequantise_ref) -> None:
        """A payload -> the block `[stride]` that it stands for. `dequantise` is the reference or, on a GPU, the kernel."""
        for name in self.block.shapes:
            out = self.block.view(name, block[None])[0]
            if name in self.parts:
                out.copy_(self.view(name, payload))
            else:
                dequantise(self.view(f"{name}.codes", payload), self.view(f"{name}.scales", payload), out, self.bits)


def half_precision_ratio(name: str) -> float:
    """`Payload.ratio` of two-byte weights in rows of whole groups, without biases."""
    return (BITS[name] / 8 + 2 / GROUP) / 2


def groups(k: int) -> int:
    """Groups of a row of k weights."""
    return -(-k // GROUP)


def quantise(weights: torch.Tensor, bits: int, name: str = "weights") -> tuple[torch.Tensor, torch.Tensor]:
    """weights [n, k] -> codes int8 [n, G*64*bits/8], scales fp16 [n, G]; the module says how. `name` is for errors."""
    n, k = weights.shape
    wide = torch.zeros(n, groups(k) * GROUP)
    wide[:, :k] = weights
    wide = wide.view(n, -1, GROUP)
    _check_range(wide, name)
    largest = wide.abs().amax(-1)
    most = (1 << (bits - 1)) - 1
    scales = (largest / most).to(torch.float16)
    divisor = torch.where(scales > 0, scales.float(), torch.inf)[..., None]
    codes = (wide / divisor).round().clamp(-most, most).to(torch.int8)
    if bits == 4:
        low, high = codes.split(GROUP // 2, dim=-1)
        codes = (low & 15) | (high << 4)
    return codes.reshape(n, -1), scales


def _check_range(weights: torch.Tensor, name: str) -> None:
    low, high = torch.aminmax(weights)
    if not (-LARGEST <= low and high <= LARGEST):  # NaN fails too
        raise ValueError(f"{name}: a weight is not finite or above {LARGEST:.0f} in magnitude, which a group-{GROUP} payload cannot hold")


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
