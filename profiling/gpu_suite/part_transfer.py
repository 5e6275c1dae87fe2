"""One expert block from host memory to a slot: how fast, pinned and not, and that it arrives whole."""

from __future__ import annotations

from statistics import median

import torch

from .pieces import Context, Skip, piece

# Bytes of one bf16 expert: the demo's, Qwen3.5-35B-A3B's, GLM-4.5-Air's.
BLOCKS = {"0.05 MB": 49_152, "6.3 MB": 6_291_456, "34.6 MB": 34_603_008}
REPEATS = 20


@piece("transfer")
def host_to_device(context: Context) -> dict:
    """Median GB/s (1e9) of one copy, by CUDA events."""
    if context.virtual:
        raise Skip("needs a CUDA device; a modelled link says nothing about a real one")
    numbers = {}
    for name, size in BLOCKS.items():
        for kind in ("pinned", "pageable"):
            source = torch.randint(0, 255, (size,), dtype=torch.uint8, pin_memory=kind == "pinned")
            slot = torch.empty(size, dtype=torch.uint8, device=context.device)
            times = [_copy_ms(source, slot) for _ in range(REPEATS + 3)][3:]
            assert torch.equal(slot.cpu(), source), f"{name}: the bytes on the device differ"
            numbers[f"{name}, {kind}"] = size / median(times) / 1e6
    return numbers


@piece("transfer")
def modelled_link(context: Context) -> dict:
    """What the hardware file makes of one expert: ms alone and as one of four."""
    from apexk import hardware

    machine = hardware.load(context.hardware)
    first, more = (machine.copy_ms(speculative=False, first=first) for first in (True, False))
    assert 0 < more <= first, "a copy takes time, and the first of a batch no less than the next"
    return {"hardware": machine.name, "alone_ms": first, "of_four_ms": (first + 3 * more) / 4}


def _copy_ms(source: torch.Tensor, slot: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    slot.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
