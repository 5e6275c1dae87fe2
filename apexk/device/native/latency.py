"""What the native transfer layer itself costs: the real channel, hand-off and CPU workers on the fake CUDA runtime.

The fake's calls stand for CUDA's, so these are the layer's own costs on this machine's CPU, never a GPU's latencies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from statistics import median

import torch

from apexk.device.native.channel import Channel, Copy
from apexk.device.native.fake import FakeCuda
from apexk.device.native.hand_off import HandOff
from apexk.kernels.cpu.ffn import HostFFN

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4  # a job small enough that handing it over is most of it
BLOCK_BYTES = 4096
ARRIVAL_NS = 200_000  # how long the rows are on their way: the host has asked for the job by then
WARM_UP = 20


def measure(rounds: int = 300, how: str | None = None) -> dict[str, float]:
    """Medians over `rounds`, in microseconds.

    `to_cpu_us`: from the rows being there to the job being given to the workers; `from_cpu_us`: from its last row to the
    joining stream going on; `hand_over_us`: both. `job_us`: between the two, a tiny job with the workers' waking up.
    `submit_call_us`, `join_call_us`: the host's calls. `copy_call_us`, `copy_8_call_us`: setting up the exact transfer of one
    expert, of eight. `how` as in `HandOff`.
    """
    with HostFFN() as ffn, closing(FakeCuda(link_gb_s=HIDDEN * 4 / ARRIVAL_NS)) as runtime:
        found = _hand_off(runtime, ffn, rounds, how)
    with closing(FakeCuda()) as runtime:
        return found | _transfer(runtime, rounds)


def _hand_off(runtime: FakeCuda, ffn: HostFFN, rounds: int, how: str | None) -> dict[str, float]:
    weights = torch.randn(EXPERTS, 3 * HIDDEN * INTERMEDIATE)
    blocks = torch.tensor([row.data_ptr() for row in weights])
    x, out = (runtime.empty_pinned((1, HIDDEN), torch.float32) for _ in range(2))
    ids, pair_weights = runtime.empty_pinned((1, 1), torch.int64), runtime.empty_pinned((1, 1), torch.float32)
    rows, ids[:], pair_weights[:] = torch.randn(1, HIDDEN), 2, 1.0
    down, back = runtime.new_stream("down"), runtime.new_stream("back")
    there, joined = runtime.new_event(timing=True), runtime.new_event(timing=True)
    samples: dict[str, list[float]] = {name: [] for name in ("to_cpu_us", "from_cpu_us", "hand_over_us", "job_us", "submit_call_us", "join_call_us")}
    with closing(HandOff(runtime, ffn, max_experts=EXPERTS, how=how)) as hand_off:
        for _ in range(rounds + WARM_UP):
            runtime.copy_async(x.data_ptr(), rows.data_ptr(), x.nbytes, False, down)
            runtime.record(there, down)
            ticket, submit_us = _timed(lambda: hand_off.submit(down, x, blocks, ids, pair_weights, [2], out, intermediate=INTERMEDIATE))
            _, join_us = _timed(lambda ticket=ticket: hand_off.join(ticket, back))
            runtime.record(joined, back)
            runtime.synchronize_event(joined)
            job = hand_off.wait(ticket)
            to_cpu, from_cpu = (job.start_ns - runtime.event_ns(there)) / 1e3, (runtime.event_ns(joined) - job.end_ns) / 1e3
            for values, value in zip(samples.values(), (to_cpu, from_cpu, to_cpu + from_cpu, (job.end_ns - job.start_ns) / 1e3, submit_us, join_us), strict=True):
                values.append(value)
    return {name: median(values[WARM_UP:]) for name, values in samples.items()}


def _transfer(runtime: FakeCuda, rounds: int) -> dict[str, float]:
    stream = runtime.new_stream("h2d")
    blocks, slots = runtime.empty_pinned((8, BLOCK_BYTES), torch.uint8), runtime.empty_device((8, BLOCK_BYTES), torch.uint8)
    copies = [Copy(i, 0, slots[i].data_ptr(), blocks[i].data_ptr(), BLOCK_BYTES) for i in range(8)]
    start, done = runtime.new_event(timing=True), runtime.new_event(timing=True)
    found = {}
    with closing(Channel(runtime, stream)) as channel:
        for name, wanted in {"copy_call_us": copies[:1], "copy_8_call_us": copies}.items():
            times = []
            for _ in range(rounds + WARM_UP):
                times.append(_timed(lambda wanted=wanted: channel.copy(wanted, done, start))[1])
                runtime.synchronize_stream(stream)
            found[name] = median(times[WARM_UP:])
    return found


def _timed(call: Callable):
    start = time.perf_counter_ns()
    result = call()
    return result, (time.perf_counter_ns() - start) / 1e3


if __name__ == "__main__":
    for way in ("flags", "host functions"):
        print(way, {name: round(value, 1) for name, value in measure(how=way).items()})
