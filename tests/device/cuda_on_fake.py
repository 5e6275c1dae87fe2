"""CudaDevice on the fake runtime: its own code, real threads, random delays; its kernels are the references.

The fake's compute stream is a thread of its own, but the model's other layers run on the calling thread: the one place
where these meet, the end of a layer, waits here. On a GPU they share a stream.
"""

from contextlib import contextmanager

from apexk.device.cuda import CudaDevice
from apexk.device.native.fake import FakeCuda
from apexk.hf import gpu


class OnFake(CudaDevice):
    def combine(self, *arguments):
        merged = super().combine(*arguments)
        self.runtime.synchronize_stream(self._compute)
        return merged


@contextmanager
def fake_gpu(monkeypatch, **options):
    """`swap(device="cuda")` gets a fake runtime made with `options`; gives the list of those that were made."""
    made = []

    def open_runtime():
        made.append(FakeCuda(**options))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "open_runtime", open_runtime)
        patch.setattr(gpu, "CudaDevice", OnFake)
        yield made


def left(runtime):
    """What was made on a runtime and not given back."""
    counters = ("streams", "events", "registrations")
    return {name: runtime.count(name) for name in counters if runtime.count(name)}
