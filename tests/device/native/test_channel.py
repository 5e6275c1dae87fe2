"""`Channel` from Python: what it returns, what it refuses, what it leaves. Its ordering is the native self-test's."""

import gc
import threading
import time

import pytest

from apexk.device.native.channel import Channel
from apexk.device.runtime import CudaError


def collect(bench, count: int) -> list[int]:
    """Tags of the next `count` copies that land."""
    landed = []
    deadline = time.monotonic() + 30
    while len(landed) < count and time.monotonic() < deadline:
        landed += bench.channel.stop(-1).landed
    return landed


def test_exact_copies(make_bench):
    bench = make_bench(runtime={"link_gb_s": 0.01, "delay_us": 200})
    assert bench.exact(bench.copy(0), bench.copy(3), bench.copy(1, slot=2)) == [0, 0, 0]
    start, end = bench.events[6], bench.events[1]
    bench.runtime.synchronize_event(end)
    assert bench.holds(0, 0) and bench.holds(3, 3) and bench.holds(2, 1)
    assert bench.runtime.elapsed_ms(start, end) >= 3 * 4096 / 0.01e9 * 1e3 * 0.99, "no faster than the link"
    assert not bench.slots[1].any() and not bench.slots[4:].any()
    assert bench.channel.copy([], end) == []


def test_a_failed_exact_copy_is_known_at_once_and_alone(make_bench):
    bench = make_bench()
    bench.runtime.fail("memcpy", after=1, code=717)
    assert bench.exact(bench.copy(0), bench.copy(1), bench.copy(2)) == [0, 717, 0]
    bench.runtime.synchronize_stream(bench.stream)
    assert bench.holds(0, 0) and bench.holds(2, 2) and not bench.slots[1].any()


def test_speculation_stops_in_one_call(make_bench):
    bench = make_bench(chunk_bytes=1024)
    gate = threading.Event()
    bench.runtime.launch(bench.stream, gate.wait)
    bench.channel.speculate([bench.copy(0, layer=1), bench.copy(1, layer=1), bench.copy(2, layer=2)])
    while not bench.channel.in_flight_bytes():
        time.sleep(0.0001)
    assert bench.channel.in_flight_bytes() <= 1024
    stopped = bench.channel.stop(1)
    assert stopped.running == (0, 1.0) and not stopped.landed and not stopped.failed
    with pytest.raises(ValueError, match="tag"):
        bench.channel.keep(1)
    bench.channel.keep(0)
    gate.set()
    bench.runtime.synchronize_event(bench.events[0])
    assert bench.holds(0, 0), "kept"
    assert collect(bench, 1) == [2] and bench.holds(2, 2), "of a later layer: goes on"
    assert not bench.slots[1].any(), "dropped before it began"


def test_abandoned_copies_leave_their_slot_to_the_next(make_bench):
    bench = make_bench(chunk_bytes=1024)
    gate = threading.Event()
    bench.runtime.launch(bench.stream, gate.wait)
    bench.channel.speculate([bench.copy(0, layer=1)])
    while not bench.channel.in_flight_bytes():
        time.sleep(0.0001)
    bench.channel.abandon(bench.channel.stop(1).running[0])
    assert bench.exact(bench.copy(4, slot=0)) == [0]
    gate.set()
    bench.runtime.synchronize_event(bench.events[4])
    assert bench.holds(0, 4)


def test_a_failed_speculative_copy_is_reported(make_bench):
    bench = make_bench()
    bench.runtime.fail("memcpy", code=717)
    bench.channel.speculate([bench.copy(0, layer=1), bench.copy(1, layer=1)])
    failed, landed, deadline = [], [], time.monotonic() + 30
    while len(failed) + len(landed) < 2 and time.monotonic() < deadline:
        found = bench.channel.stop(0)
        failed += found.failed
        landed += found.landed
        assert found.error == (717 if found.failed else 0)
    assert failed == [0] and landed == [1] and bench.holds(1, 1)


def test_full(make_bench):
    bench = make_bench(capacity=2)
    with pytest.raises(RuntimeError, match="2 copies at most.*3 more.*larger capacity"):
        bench.channel.speculate([bench.copy(0), bench.copy(1), bench.copy(2)])
    bench.channel.speculate([bench.copy(0), bench.copy(1)])
    assert collect(bench, 2) == [0, 1]


def test_refusals(make_bench):
    bench = make_bench()
    with pytest.raises(ValueError, match="out of range"):
        bench.exact(bench.copy(0)._replace(nbytes=0))
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        Channel(bench.runtime, bench.stream, chunk_bytes=0, capacity=5)
    bench.runtime.fail("event_create", code=2)
    with pytest.raises(CudaError, match="starting the transfer channel failed with CUDA error 2"):
        Channel(bench.runtime, bench.stream)
    bench.channel.close()
    for call in (lambda: bench.exact(bench.copy(0)), lambda: bench.channel.stop(0), bench.channel.in_flight_bytes,
                 lambda: bench.channel.speculate([]), lambda: bench.channel.abandon(0)):
        with pytest.raises(ValueError, match="closed"):
            call()
    bench.channel.close()


def test_steady_state_allocates_nothing(make_bench):
    bench = make_bench()
    made = bench.runtime.allocations()
    for _ in range(30):
        bench.channel.speculate([bench.copy(0, layer=1), bench.copy(1, layer=2)])
        bench.exact(bench.copy(2))
        bench.channel.stop(3)
        bench.runtime.synchronize_stream(bench.stream)
    assert bench.runtime.allocations() == made and bench.runtime.count("pageable_copies") == 0


def test_dropped_copies_are_forgotten(make_bench):
    bench = make_bench()
    for tag in range(0, 60, 3):
        bench.channel.speculate([bench.copy(n, layer=1)._replace(tag=tag + n) for n in range(3)])
        bench.channel.stop(1)
    assert len(bench.channel._speculative) <= 1, "one at most is owed an answer"
    bench.channel.speculate([bench.copy(0, layer=1)._replace(tag=60), bench.copy(1, layer=2)._replace(tag=61)])
    assert collect(bench, 2) == [60, 61], "those of later layers go on"
    assert not bench.channel._speculative


def test_close_while_copies_are_under_way(make_bench):
    bench = make_bench(nbytes=1 << 16, runtime={"link_gb_s": 0.01})
    bench.exact(bench.copy(0))
    bench.channel.speculate([bench.copy(n, layer=1) for n in range(1, 5)])
    bench.channel.close()
    assert bench.holds(0, 0), "an exact copy has been waited for"
    seen = bench.slots.clone()
    time.sleep(0.02)
    assert bench.slots.equal(seen), "nothing writes to a slot any more"


def test_dropped_without_close(make_runtime):
    """A channel that nobody holds any more ends by itself, its runtime after it."""
    runtime = make_runtime()
    events = runtime.count("events")
    channel = Channel(runtime, runtime.new_stream("h2d"))
    assert runtime.count("events") > events
    del channel
    gc.collect()
    assert runtime.count("events") == events


def test_idle_takes_no_cpu(make_bench, assert_idle):
    bench = make_bench()
    bench.channel.speculate([bench.copy(0, layer=1)])
    assert collect(bench, 1) == [0]
    assert_idle()
