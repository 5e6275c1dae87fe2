"""Times of one call, in nanoseconds: by the clock on the CPU, by events around CUDA graphs on a GPU.

On a GPU all repetitions are queued before the host waits, with the L2 cache overwritten between them, so that neither
launch overhead of the host nor data of the repetition before is in the figure.

Several calls take turns, one repetition each on a GPU. On the CPU a turn is one call that does not count and then two that
do: threads of the call before may still spin, and caches hold its data. One that takes LONG_NS is called once and counted:
what a turn starts with does not show in seconds.
"""

import statistics
import time

import torch

LEAST, MOST = 5, 200
TURN = 2
LONG_NS = 3e9


def times_ns(call, device, budget_s=1.0) -> list[float]:
    """At least LEAST repetitions, then as many as the budget allows, after a warm-up."""
    return alternating_times_ns([call], device, budget_s)[0]


def alternating_times_ns(calls, device, budget_s=1.0) -> list[list[float]]:
    """Times of each call; the budget is that of one."""
    return cuda_times_ns(calls, budget_s) if device == "cuda" else host_times_ns(calls, budget_s)


def host_times_ns(calls, budget_s) -> list[list[float]]:
    times = [[] for _ in calls]
    if len(calls) == 1:
        calls[0]()
    end = time.perf_counter_ns() + budget_s * len(calls) * 1e9
    turns = list(zip(calls, times, strict=True))
    while turns and (len(turns[0][1]) < LEAST or (len(turns[0][1]) < MOST and time.perf_counter_ns() < end)):
        for call, taken in turns:
            first = _clocked(call) if len(calls) > 1 else 0
            taken += [first] if first > LONG_NS else [_clocked(call) for _ in range(TURN if len(calls) > 1 else 1)]
        turns = [(call, taken) for call, taken in turns if taken[0] <= LONG_NS]
    return times


def _clocked(call) -> float:
    start = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - start)


def cuda_times_ns(calls, budget_s) -> list[list[float]]:
    replays = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        replays.append(_graph(call))
    scratch = torch.empty(2 * l2_bytes(), dtype=torch.uint8, device="cuda")
    repetitions = min(_repetitions(replay, budget_s) for replay in replays)
    marks = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in replays] for _ in range(repetitions)]
    for turn in marks:
        for replay, (start, end) in zip(replays, turn, strict=True):
            scratch.zero_()
            start.record()
            replay()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e6 for start, end in of_call] for of_call in zip(*marks, strict=True)]


def l2_bytes() -> int:
    return max(torch.cuda.get_device_properties(0).L2_cache_size, 1 << 20)


def quantiles(times) -> dict:
    """p20, p50 and p80."""
    if len(times) == 1:
        return {"p20_ns": times[0], "p50_ns": times[0], "p80_ns": times[0]}
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {"p20_ns": fifths[0], "p50_ns": statistics.median(times), "p80_ns": fifths[3]}


def _graph(call):
    """The call as a CUDA graph; the call itself where it cannot be captured, which times its launches too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def _repetitions(replay, budget_s) -> int:
    start = time.perf_counter_ns()
    replay()
    torch.cuda.synchronize()
    return int(min(MOST, max(LEAST, budget_s * 1e9 / max(time.perf_counter_ns() - start, 1))))
