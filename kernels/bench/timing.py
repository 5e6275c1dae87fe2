"""Times of one call, in nanoseconds: by the clock on the CPU, by events around CUDA graphs on a GPU.

On a GPU all repetitions are queued before the host waits, with the L2 cache overwritten between them, so that neither
launch overhead of the host nor data of the repetition before is in the figure.
"""

import statistics
import time

import torch

LEAST, MOST = 5, 200


def times_ns(call, device, budget_s=1.0) -> list[float]:
    """At least LEAST repetitions, then as many as the budget allows, after a warm-up."""
    return cuda_times_ns(call, budget_s) if device == "cuda" else host_times_ns(call, budget_s)


def host_times_ns(call, budget_s) -> list[float]:
    call()
    times, end = [], time.perf_counter_ns() + budget_s * 1e9
    while len(times) < LEAST or (len(times) < MOST and time.perf_counter_ns() < end):
        start = time.perf_counter_ns()
        call()
        times.append(float(time.perf_counter_ns() - start))
    return times


def cuda_times_ns(call, budget_s) -> list[float]:
    call()
    torch.cuda.synchronize()
    replay = _graph(call)
    scratch = torch.empty(2 * l2_bytes(), dtype=torch.uint8, device="cuda")
    repetitions = _repetitions(replay, budget_s)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in marks:
        scratch.zero_()
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e6 for start, end in marks]


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
