"""Expert blocks from host memory to slots, and rows to the CPU kernels and back: how fast, and that they arrive whole.

Virtually the same code runs on the fake runtime, whose numbers say nothing about a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from .part_kernels import build_native
from .pieces import Context, Skip, piece

# Bytes of one bf16 expert: the demo's, Qwen3.5-35B-A3B's, GLM-4.5-Air's.
BLOCKS = {"0.05 MB": 49_152, "6.3 MB": 6_291_456, "34.6 MB": 34_603_008}
REPEATS = 20
WARM_UP = 3


@piece("transfer")
def host_to_device(context: Context) -> dict:
    """Median GB/s (1e9) of one copy, by CUDA events: torch's pinned and pageable memory."""
    if context.virtual:
        raise Skip("needs a CUDA device; a modelled link says nothing about a real one")
    numbers = {}
    for name, size in BLOCKS.items():
        for kind in ("pinned", "pageable"):
            source = torch.randint(0, 255, (size,), dtype=torch.uint8, pin_memory=kind == "pinned")
            slot = torch.empty(size, dtype=torch.uint8, device=context.device)
            times = [_copy_ms(source, slot) for _ in range(REPEATS + WARM_UP)][WARM_UP:]
            assert torch.equal(slot.cpu(), source), f"{name}: the bytes on the device differ"
            numbers[f"{name}, {kind}"] = size / median(times) / 1e6
    return numbers


@piece("transfer")
def registration(context: Context) -> dict:
    """A host store's pages pinned where they are: seconds for each GiB, and GB/s of a block copied from there."""
    from apexk.store.block import ExpertBlock
    from apexk.store.host_store import HostStore

    with _runtime(context) as runtime:
        block = ExpertBlock(2048, 512, torch.bfloat16)
        store = HostStore(1, 4 if context.virtual else 171, block)  # a GiB
        store.blocks(0).view(torch.int16).random_(0, 255)
        result = store.pin(runtime)
        try:
            assert result.failure is None, result.failure
            stream, slot = runtime.new_stream("h2d"), runtime.empty_device((block.payload_bytes,), torch.uint8)
            source = store.blocks(0)[1].view(torch.uint8)[: block.payload_bytes]
            ms = _ms(runtime, stream, lambda: runtime.copy_async(slot.data_ptr(), source.data_ptr(), block.payload_bytes, True, stream))
            assert torch.equal(slot.cpu(), source), "the bytes on the device differ"
        finally:
            store.unpin()
        return {"seconds a GiB": result.seconds / (result.bytes / 2**30), "GB/s of 6.3 MB": block.payload_bytes / ms / 1e6}


@piece("transfer")
def sm_gather(context: Context) -> dict:
    """The same blocks by the kernel that reads pinned memory: GB/s of one launch for 1 and for 8 experts."""
    from apexk.kernels.cuda.reference import slot_gather_ref
    from apexk.kernels.cuda.slots import slot_gather

    numbers = {}
    with _runtime(context) as runtime:
        kernel = None if context.virtual else runtime.kernel("slot_gather")
        for name, size in list(BLOCKS.items())[: 1 if context.virtual else None]:
            stride = -(-size // 4096) * 4096
            host = runtime.empty_pinned((8, stride), torch.uint8)
            host.random_(0, 255)
            blocks = (runtime.device_address(host) + torch.arange(8) * stride).to(runtime.device)
            pool = runtime.empty_device((8, stride), torch.uint8)
            experts, slots = torch.arange(8, dtype=torch.int32, device=runtime.device), torch.arange(7, -1, -1, dtype=torch.int32, device=runtime.device)
            ready, landed = (torch.zeros(8, dtype=torch.int32, device=runtime.device) for _ in range(2))
            stream = runtime.new_stream("gather")
            for count in (1, 8):
                number = torch.tensor([count], dtype=torch.int32, device=runtime.device)
                given = (blocks, experts, slots, number, number, pool, ready)

                def launch(given=given, landed=landed, size=size) -> None:
                    if kernel is None:
                        slot_gather_ref(*given, size)
                    else:
                        slot_gather(kernel, *given, landed, size)

                ms = _ms(runtime, stream, partial(runtime.launch, stream, launch))
                assert torch.equal(pool.cpu()[8 - count :, :size], host[:count, :size].flip(0)), f"{name}: the bytes in the slots differ"
                numbers[f"{name} x {count}"] = count * size / ms / 1e6
    return numbers


@piece("transfer")
def channel(context: Context) -> dict:
    """Host us that an exact copy's set-up takes, and device ms from the call to the copy's end beside a speculative queue."""
    from apexk.device.native.channel import Channel, Copy

    build_native()
    size = BLOCKS["0.05 MB" if context.virtual else "6.3 MB"]
    with _runtime(context) as runtime:
        stream = runtime.new_stream("h2d")
        host, slots = runtime.empty_pinned((9, size), torch.uint8), runtime.empty_device((9, size), torch.uint8)
        host.random_(0, 255)
        copies = Channel(runtime, stream)
        try:
            events = [(runtime.new_event(timing=True), runtime.new_event(timing=True)) for _ in range(9)]
            setup, alone, beside = [], [], []
            for turn in range(REPEATS + WARM_UP):
                for times, speculative in ((alone, 0), (beside, 8)):
                    copies.speculate([Copy(100 * turn + i, 0, slots[i].data_ptr(), host[i].data_ptr(), size, events[i][1], events[i][0]) for i in range(speculative)])
                    began = time.perf_counter()
                    (error,) = copies.copy([Copy(100 * turn + 8, 0, slots[8].data_ptr(), host[8].data_ptr(), size)], events[8][1], events[8][0])
                    setup.append(time.perf_counter() - began)
                    assert not error, f"CUDA error {error}"
                    runtime.synchronize_event(events[8][1])
                    times.append(time.perf_counter() - began)
                    stopped = copies.stop(0)
                    if stopped.running is not None:
                        copies.abandon(stopped.running[0])
                    runtime.synchronize_stream(stream)
            assert torch.equal(slots[8].cpu(), host[8]), "the bytes in the slot differ"
        finally:
            copies.close()
    return {"set-up us": median(setup[2 * WARM_UP :]) * 1e6, "ms, alone": median(alone[WARM_UP:]) * 1e3, "ms, beside prefetches": median(beside[WARM_UP:]) * 1e3}


@piece("transfer")
def hand_off(context: Context) -> dict:
    """Device us from rows being there to the stream going on behind the CPU's rows, one token and one small expert: the cost
    of the hand-over itself, by flags and by host functions."""
    from apexk.device.native.hand_off import HandOff
    from apexk.kernels.cpu.ffn import HostFFN

    build_native()
    numbers = {}
    hidden = inter = 64
    for how in ("flags", "host functions"):
        with _runtime(context) as runtime, HostFFN(threads=1) as ffn:
            if how == "flags" and not runtime.has_stream_memory_operations:
                numbers[how] = "not on this device"
                continue
            down, back = runtime.new_stream("down"), runtime.new_stream("back")
            start, end = runtime.new_event(timing=True), runtime.new_event(timing=True)
            block = torch.randn(3 * hidden * inter) / 8
            x, out = runtime.empty_pinned((1, hidden), torch.float32), runtime.empty_pinned((1, hidden), torch.float32)
            x.normal_()
            ids, weights = runtime.empty_pinned((1, 1), torch.int32), runtime.empty_pinned((1, 1), torch.float32)
            ids.zero_(), weights.fill_(1)
            hand = HandOff(runtime, ffn, max_experts=1, how=how)
            try:
                times = []
                for _ in range(REPEATS + WARM_UP):
                    runtime.record(start, down)
                    ticket = hand.submit(down, x, torch.tensor([block.data_ptr()]), ids, weights, [0], out, intermediate=inter)
                    hand.join(ticket, back)
                    runtime.record(end, back)
                    runtime.synchronize_event(end)
                    times.append(runtime.elapsed_ms(start, end))
            finally:
                hand.close()
            w13, w2 = block[: 2 * hidden * inter].view(2 * inter, hidden), block[2 * hidden * inter :].view(hidden, inter)
            gate, up = (x @ w13.T).split(inter, 1)
            assert torch.allclose(out, (torch.nn.functional.silu(gate) * up) @ w2.T, rtol=1e-4, atol=1e-5), "the CPU's row differs"
            numbers[f"us, {how}"] = median(times[WARM_UP:]) * 1e3
    return numbers


@piece("transfer")
def modelled_link(context: Context) -> dict:
    """What the hardware file makes of one expert: ms alone and as one of four."""
    from apexk import hardware

    machine = hardware.load(context.hardware)
    first, more = (machine.copy_ms(speculative=False, first=first) for first in (True, False))
    assert 0 < more <= first, "a copy takes time, and the first of a batch no less than the next"
    return {"hardware": machine.name, "alone_ms": first, "of_four_ms": (first + 3 * more) / 4}


@contextmanager
def _runtime(context: Context):
    try:
        if context.virtual:
            from apexk.device.native.fake import FakeCuda

            runtime = FakeCuda()
        else:
            from apexk.device.cuda_runtime import TorchCuda

            runtime = TorchCuda()
    except (ImportError, RuntimeError) as error:
        raise Skip(str(error)) from error
    try:
        yield runtime
    finally:
        runtime.close()


def _ms(runtime, stream, launch: Callable[[], None]) -> float:
    """Median device time of what `launch` puts on a stream."""
    start, end, times = runtime.new_event(timing=True), runtime.new_event(timing=True), []
    for _ in range(REPEATS + WARM_UP):
        runtime.record(start, stream)
        launch()
        runtime.record(end, stream)
        runtime.synchronize_event(end)
        times.append(runtime.elapsed_ms(start, end))
    return median(times[WARM_UP:])


def _copy_ms(source: torch.Tensor, slot: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    slot.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
