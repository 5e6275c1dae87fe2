"""What a compute capability offers, and one named part of each for the estimate of bytes in flight."""

from dataclasses import dataclass

from apexk.kernels.triton.tune import SHARED_KIB


@dataclass(frozen=True)
class Target:
    """Limits of one streaming multiprocessor (SM) by NVIDIA's table of compute capabilities; registers are 65,536 each."""

    cc: int
    warps: int
    blocks: int
    shared_kib: int  # of an SM; a block may use SHARED_KIB of it
    part: str
    sms: int
    gb_per_s: float  # the part's memory bandwidth
    latency_ns: float  # rule of thumb, from request to data under load

    @property
    def block_shared_bytes(self) -> int:
        return SHARED_KIB[self.cc] * 1024

    @property
    def need_kib(self) -> float:
        """Bytes each SM must have requested at any time to keep memory busy (Little's law)."""
        return self.gb_per_s * self.latency_ns / self.sms / 1024


TARGETS = {
    target.cc: target
    for target in (
        Target(80, 64, 32, 164, "A100", 108, 1555, 600),
        Target(86, 48, 16, 100, "RTX A6000", 84, 768, 600),
        Target(89, 48, 24, 100, "L40S", 142, 864, 600),
        Target(90, 64, 32, 228, "H200", 132, 4300, 700),
        Target(100, 64, 32, 228, "B200", 148, 7700, 800),
        Target(103, 64, 32, 228, "B300", 148, 7700, 800),
        Target(120, 48, 24, 100, "RTX 5090", 170, 1790, 600),
    )
}


@dataclass(frozen=True)
class Occupancy:
    blocks: int
    percent: int
    limiter: str  # regs, smem, warps or blocks
    fits: bool  # a launch with so much shared memory is possible at all


def occupancy(cc, regs, shared, warps) -> Occupancy:
    """Resident blocks of an SM for a kernel's registers a thread, shared bytes and warps a block."""
    target = TARGETS[cc]
    limits = {"warps": target.warps // warps, "blocks": target.blocks}
    if regs:
        per_warp = -(-regs * 32 // 256) * 256  # given out in units of 256
        limits["regs"] = (65536 // 4 // per_warp) * 4 // warps if warps >= 4 else 65536 // per_warp // warps
    if shared:
        limits["smem"] = target.shared_kib * 1024 // (shared + 1024)  # each block has 1 KiB of its own besides
    limiter = min(limits, key=lambda name: (limits[name], name not in ("regs", "smem")))
    blocks = limits[limiter]
    return Occupancy(blocks, round(100 * blocks * warps / target.warps), limiter, shared <= target.block_shared_bytes)
