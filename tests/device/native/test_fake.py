"""The fake runtime behaves as CUDA does where our code relies on it."""

import threading
import time
from ctypes import CFUNCTYPE, c_int32, c_uint64, c_void_p

import pytest
import torch

from apexk.device.native.fake import FakeCuda
from apexk.device.runtime import CudaError, OutOfMemory


def test_streams_run_beside_each_other_and_events_order_them(make_runtime):
    runtime = make_runtime(delay_us=100)
    first, second = runtime.new_stream("first"), runtime.new_stream("second")
    gate, event, seen = threading.Event(), runtime.new_event(), []
    runtime.launch(first, gate.wait)
    runtime.launch(first, lambda: seen.append("first"))
    runtime.record(event, first)
    runtime.launch(second, lambda: seen.append("beside"))
    runtime.synchronize_stream(second)
    runtime.wait(second, event)
    runtime.launch(second, lambda: seen.append("behind"))
    assert seen == ["beside"] and not runtime.query(event)
    gate.set()
    runtime.synchronize_stream(second)
    assert seen == ["beside", "first", "behind"] and runtime.query(event)


def test_a_wait_names_the_latest_record_and_none_is_none(make_runtime):
    runtime = make_runtime()
    first, second, event = runtime.new_stream("first"), runtime.new_stream("second"), runtime.new_event()
    runtime.wait(second, event)
    runtime.synchronize_stream(second)
    assert runtime.query(event)
    gate = threading.Event()
    runtime.record(event, first)
    runtime.wait(second, event)
    runtime.launch(first, gate.wait)
    runtime.record(event, first)
    runtime.synchronize_stream(second)  # waited for the first record only
    assert not runtime.query(event)
    gate.set()
    runtime.synchronize_event(event)


def test_the_link_is_shared_by_a_direction(make_runtime):
    runtime = make_runtime(link_gb_s=0.02)
    source, target = runtime.empty_pinned((4, 100_000), torch.uint8).random_(), runtime.empty_device((4, 100_000), torch.uint8)
    streams = [runtime.new_stream(str(n)) for n in range(2)]
    start = time.perf_counter()
    for n in range(4):
        runtime.copy_async(target[n].data_ptr(), source[n].data_ptr(), 100_000, True, streams[n % 2])
    for stream in streams:
        runtime.synchronize_stream(stream)
    assert time.perf_counter() - start >= 4 * 100_000 / 0.02e9 and torch.equal(source, target)


def test_an_eager_stream_does_what_waits_for_nothing_within_the_call(make_runtime):
    runtime = make_runtime(eager=True)
    first, second, event, seen = runtime.new_stream("first"), runtime.new_stream("second"), runtime.new_event(), []
    source, target = runtime.empty_pinned((64,), torch.uint8).random_(), runtime.empty_device((64,), torch.uint8)
    here = threading.get_ident()
    runtime.launch(first, lambda: seen.append(threading.get_ident()))
    runtime.copy_async(target.data_ptr(), source.data_ptr(), 64, True, first)
    runtime.record(event, first)
    assert seen == [here] and torch.equal(source, target) and runtime.query(event)
    runtime.record(event, first)
    runtime.wait(second, event)
    runtime.launch(second, lambda: seen.append("behind"))
    assert seen == [here, "behind"]


def test_an_eager_stream_keeps_its_order_behind_what_must_wait(make_runtime):
    runtime = make_runtime(eager=True)
    table, flag = runtime.table(), runtime.empty_pinned((1,), torch.int64).zero_()
    wait_value = CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64, c_int32)(table.stream_wait_value64)
    stream, event, seen = runtime.new_stream("waits"), runtime.new_event(), []
    assert wait_value(stream.handle, flag.data_ptr(), 1, 0) == 0
    runtime.launch(stream, lambda: seen.append("kernel"))
    runtime.record(event, stream)
    assert seen == [] and not runtime.query(event)
    flag[0] = 1
    runtime.synchronize_stream(stream)
    assert seen == ["kernel"] and runtime.query(event)


def test_an_eager_stream_has_no_time_for_a_link():
    with pytest.raises(ValueError, match="0.5 GB/s"):
        FakeCuda(eager=True, link_gb_s=0.5)


def test_memory_that_outlives_its_runtime_is_given_back_with_its_last_view():
    def mapped() -> int:
        return sum(line.startswith("VmSize") and int(line.split()[1]) for line in open("/proc/self/status")) << 10

    size, before = 256 << 20, mapped()
    for _ in range(4):
        runtime = FakeCuda()
        there = runtime.empty_device((size,), torch.uint8)
        runtime.close()
        there[0] = 1  # its owner still holds it
        del there
    assert mapped() - before < size


def test_memory(make_runtime):
    runtime = make_runtime(memory_bytes=1 << 20)
    assert runtime.memory_info() == (1 << 20, 1 << 20)
    held = runtime.empty_device((600_000,), torch.uint8)
    with pytest.raises(OutOfMemory, match="cudaMalloc failed with CUDA error 2"):
        runtime.empty_device((600_000,), torch.uint8)
    view = held[5:]
    del held
    assert runtime.memory_info()[0] == (1 << 20) - 600_000
    del view
    assert runtime.memory_info()[0] == 1 << 20
    runtime.fail("malloc_host", code=2)
    with pytest.raises(MemoryError):
        runtime.empty_pinned((4,), torch.float32)


def test_registration(make_runtime):
    runtime = make_runtime()
    memory, slot = torch.zeros(1 << 16, dtype=torch.uint8), runtime.empty_device((1 << 16,), torch.uint8)
    stream = runtime.new_stream("h2d")
    runtime.copy_async(slot.data_ptr(), memory.data_ptr(), memory.nbytes, True, stream)
    assert runtime.count("pageable_copies") == 1
    runtime.register(memory.data_ptr(), memory.nbytes)
    with pytest.raises(CudaError, match="712"):
        runtime.register(memory.data_ptr(), memory.nbytes)
    runtime.copy_async(slot.data_ptr(), memory.data_ptr() + 5, 100, True, stream)
    assert runtime.count("pageable_copies") == 1 and runtime.count("registrations") == 1
    runtime.unregister(memory.data_ptr())
    with pytest.raises(CudaError, match="713"):
        runtime.unregister(memory.data_ptr())
    runtime.synchronize_stream(stream)


def test_a_kernel_s_exception_is_raised_by_the_next_call(make_runtime):
    runtime = make_runtime()
    stream = runtime.new_stream("s")

    def kernel():
        raise ZeroDivisionError("in the kernel")

    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        runtime.launch(stream, kernel)  # it may run before this call returns
        runtime.synchronize_stream(stream)
    runtime.synchronize_stream(stream)


def test_injected_failures_and_refusals(make_runtime):
    runtime = make_runtime()
    event, stream = runtime.new_event(), runtime.new_stream("s")
    runtime.fail("event_record", after=1, code=700)
    runtime.record(event, stream)
    with pytest.raises(CudaError, match="cudaEventRecord failed with CUDA error 700") as raised:
        runtime.record(event, stream)
    assert raised.value.code == 700
    runtime.record(event, stream)
    with pytest.raises(ValueError, match="no call 'mallok'.*malloc, malloc_host"):
        runtime.fail("mallok")
    with pytest.raises(RuntimeError, match="close it first"):
        FakeCuda()


def test_close_ends_whatever_waits(make_runtime):
    runtime = make_runtime()
    stream, flag = runtime.new_stream("s"), runtime.empty_pinned((1,), torch.int64).zero_()
    never = threading.Event()
    runtime.launch(stream, lambda: never.wait(0.05))
    runtime.copy_async(flag.data_ptr(), flag.data_ptr(), 8, False, stream)
    runtime.close()
    runtime.close()
    assert FakeCuda().close() is None
