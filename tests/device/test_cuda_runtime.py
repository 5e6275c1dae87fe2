"""The real runtime where there is no GPU: what it says is missing, and what it asks of cupy and the libraries, by stand-ins
with the calls and argument counts of `cupy.cuda.runtime`."""

import ctypes
import inspect
import sys
import types
from contextlib import nullcontext

import pytest
import torch

from apexk.device import cuda_runtime
from apexk.device.cuda_runtime import TorchCuda
from apexk.device.native.library import CudaApi
from apexk.device.runtime import CudaError, CudaRuntime, OutOfMemory

NOT_READY = 600


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class Calls:
    """`cupy.cuda.runtime`, keeping what it was asked. An event is not ready while it is in `busy`."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.seen, self.busy, self.fails, self.memory = [], set(), {}, {}

    def _note(self, name, *arguments):
        self.seen.append((name, *arguments))
        if name in self.fails:
            raise CUDARuntimeError(self.fails[name])

    def eventCreateWithFlags(self, flags):
        self._note("eventCreateWithFlags", flags)
        return 1000 + len(self.seen)

    def hostAlloc(self, size, flags):
        self._note("hostAlloc", size, flags)
        memory = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def freeHost(self, ptr):
        del self.memory[ptr]

    def eventQuery(self, event):
        return NOT_READY if event in self.busy else self.fails.get("eventQuery", 0)

    def eventElapsedTime(self, start, end):
        return 1.5

    def eventRecord(self, event, stream): self._note("eventRecord", event, stream)  # noqa: E704
    def eventSynchronize(self, event): self._note("eventSynchronize", event)  # noqa: E704
    def eventDestroy(self, event): self._note("eventDestroy", event)  # noqa: E704
    def streamWaitEvent(self, stream, event, flags=0): self._note("streamWaitEvent", stream, event)  # noqa: E704
    def streamSynchronize(self, stream): self._note("streamSynchronize", stream)  # noqa: E704
    def hostRegister(self, ptr, size, flags): self._note("hostRegister", ptr, size, flags)  # noqa: E704
    def hostUnregister(self, ptr): self._note("hostUnregister", ptr)  # noqa: E704
    def memcpyAsync(self, dst, src, size, kind, stream): self._note("memcpyAsync", dst, src, size, kind, stream)  # noqa: E704
    def profilerStart(self): self._note("profilerStart")  # noqa: E704
    def profilerStop(self): self._note("profilerStop")  # noqa: E704


class Library:
    """libcudart and libcuda: an attribute that says yes."""

    def __init__(self, memory_operations=1):
        self.cleared, self.memory_operations = 0, memory_operations

    def cudaGetLastError(self):
        self.cleared += 1

    def cuDeviceGet(self, device, ordinal):
        return 0

    def cuDeviceGetAttribute(self, value, number, device):
        assert number == 122
        value._obj.value = self.memory_operations
        return 0

    def cudaHostGetDevicePointer(self, address, pinned, flags):
        address._obj.value = pinned.value
        return 0


@pytest.fixture
def stand_ins(monkeypatch):
    calls, library = Calls(), Library()
    streams = iter(range(7, 100))
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=calls, ExternalStream=lambda handle: nullcontext()), uint64=int)
    monkeypatch.setattr(cuda_runtime, "_cupy", lambda: cupy)
    monkeypatch.setattr(cuda_runtime, "_libraries", lambda: (library, library))
    monkeypatch.setattr(cuda_runtime, "_address", lambda library, function: len(function))
    for name, value in {
        "current_device": lambda: 0, "get_device_name": lambda device: "a GPU", "mem_get_info": lambda device: (1, 2),
        "Stream": lambda device: types.SimpleNamespace(cuda_stream=next(streams)), "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: types.SimpleNamespace(cuda_stream=0), "get_device_capability": lambda device: (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return calls, library, cupy


def test_every_method_of_the_protocol_is_there():
    wanted = {name for name, _ in inspect.getmembers(CudaRuntime, inspect.isfunction) if not name.startswith("_")}
    assert not {name for name in wanted if name not in vars(TorchCuda)}


def test_what_is_missing_is_said(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="device 'cuda' needs a GPU.*device 'cpu' runs without one"):
            TorchCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="pip install cupy-cuda13x"):
        TorchCuda()
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(RuntimeError, match="needs libcudart.so.99 and libcuda.so.1"):
        cuda_runtime._libraries()


def test_calls(stand_ins):
    calls, library, _ = stand_ins
    runtime = TorchCuda()
    stream, timing, plain = runtime.new_stream("side"), runtime.new_event(timing=True), runtime.new_event()
    assert [call[:2] for call in calls.seen] == [("eventCreateWithFlags", 0), ("eventCreateWithFlags", 2)]
    assert runtime.allocations() == 3
    calls.seen.clear()
    runtime.record(timing, stream)
    runtime.wait(stream, plain)
    runtime.register(4096, 8192)
    runtime.unregister(4096)
    runtime.copy_async(1, 2, 3, True, stream)
    runtime.copy_async(1, 2, 3, False, stream)
    assert calls.seen == [
        ("eventRecord", timing.handle, stream.handle), ("streamWaitEvent", stream.handle, plain.handle), ("hostRegister", 4096, 8192, 3),
        ("hostUnregister", 4096), ("memcpyAsync", 1, 2, 3, 1, stream.handle), ("memcpyAsync", 1, 2, 3, 2, stream.handle),
    ]  # fmt: skip
    calls.busy.add(timing.handle)
    assert not runtime.query(timing) and runtime.query(plain) and library.cleared == 1
    assert runtime.elapsed_ms(timing, plain) == 1.5
    runtime.close()
    runtime.close()
    assert [call for call in calls.seen if call[0] == "eventDestroy"] == [("eventDestroy", e.handle) for e in (plain, timing)]


def test_pinned_memory_is_exact_and_goes_with_its_last_view(stand_ins):
    calls, _, _ = stand_ins
    runtime = TorchCuda()
    tensor = runtime.empty_pinned((3, 5), torch.bfloat16)
    assert calls.seen[-1] == ("hostAlloc", 30, 3) and tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16
    view = tensor[1]
    assert runtime.device_address(tensor) == tensor.data_ptr()
    del tensor
    assert calls.memory
    del view
    assert not calls.memory
    assert runtime.empty_pinned((0, 4), torch.float32).shape == (0, 4)
    mapped = cuda_runtime.Mapped(torch.zeros(2, 3, dtype=torch.int32), 4096)
    assert mapped.__cuda_array_interface__ == {"shape": (2, 3), "typestr": "<i4", "data": (4096, False), "version": 3}


def test_errors_keep_their_code(stand_ins):
    calls, library, _ = stand_ins
    runtime = TorchCuda()
    calls.fails = {"hostRegister": 2, "eventRecord": 400, "eventQuery": 700}
    with pytest.raises(OutOfMemory, match="hostRegister failed with CUDA error 2: status 2"):
        runtime.register(4096, 8192)
    with pytest.raises(CudaError, match="eventRecord failed with CUDA error 400") as error:
        runtime.record(runtime.new_event(), runtime.new_stream("x"))
    assert error.value.code == 400
    with pytest.raises(CudaError, match="eventQuery failed with CUDA error 700"):
        runtime.query(runtime.new_event())
    assert library.cleared == 1, "cupy asks for an event's state without its check, which clears the thread's last error"


@pytest.mark.parametrize("memory_operations", [0, 1])
def test_the_table_holds_every_function_that_there_is(stand_ins, memory_operations):
    stand_ins[1].memory_operations = memory_operations
    runtime = TorchCuda()
    assert runtime.has_stream_memory_operations == bool(memory_operations)
    empty = {name for name, _ in CudaApi._fields_ if not getattr(runtime.table(), name)}
    assert empty == (set() if memory_operations else {"stream_write_value64", "stream_wait_value64"})


def test_kernels_come_from_the_cubin_of_this_gpu(stand_ins, monkeypatch, tmp_path):
    _, _, cupy = stand_ins
    cubin, launched = tmp_path / "k.cubin", []
    monkeypatch.setattr(cuda_runtime.build, "cubin", lambda name, target: cubin if (name, target) == ("slot_ready", 90) else None)
    monkeypatch.setattr(cuda_runtime.build, "nvcc", lambda: None)
    made = []
    cupy.RawModule = lambda **how: made.append(how) or types.SimpleNamespace(get_function=lambda name: lambda *call: launched.append((name, *call)))
    cubin.touch()
    kernel = TorchCuda().kernel("slot_ready")
    kernel((1,), (32,), (5, 6))
    assert made == [{"path": str(cubin)}] and launched == [("slot_ready", (1,), (32,), (5, 6))]
    cubin.unlink()
    TorchCuda().kernel("slot_ready")
    assert "slot_ready" in made[-1]["code"] and "path" not in made[-1]
