"""CudaDevice on the fake runtime: its own code, real threads, random delays; its kernels are the references.

The fake's compute stream is a thread of its own, but the model's other layers run on the calling thread: the one place
where these meet, the end of a layer, waits here. On a GPU they share a stream.
"""

import time
from contextlib import contextmanager

import apexk.engine.layer
from apexk.device import cuda
from apexk.device.cuda_clock import Operation
from apexk.device.native.fake import FakeCuda
from apexk.hf import gpu

NAP_S = 0.003


class Slow(FakeCuda):
    """One stream is slow: `slow` names it; "h2d" has a slow link, "start" a slow first kernel."""

    def __init__(self, slow=None, **options):
        if slow == "h2d":
            options["link_gb_s"] = 0.01
        super().__init__(**options)
        self.slow = slow

    def launch(self, stream, fn):
        if self.slow == "start":
            self.slow = None
            super().launch(stream, lambda: time.sleep(100 * NAP_S))
        self._nap(stream)
        super().launch(stream, fn)

    def copy_async(self, dst, src, nbytes, to_device, stream):
        self._nap(stream)
        super().copy_async(dst, src, nbytes, to_device, stream)

    def _nap(self, stream):
        if stream.name == self.slow:
            super().launch(stream, lambda: time.sleep(NAP_S))


@contextmanager
def fake_gpu(monkeypatch, **options):
    """`swap(device="cuda")` gets a fake runtime made with `options`; gives the list of those that were made."""
    made, join = [], apexk.engine.layer.join

    class OnFake(cuda.CudaDevice):
        def combine(self, at, rows, experts, out, shared, after):
            self.merged = list(after)
            return super().combine(at, rows, experts, out, shared, after)

    def open_runtime():
        made.append(Slow(**options))
        return made[-1]

    def joined(engine, *arguments, **more):
        join(engine, *arguments, **more)
        runtime = made[-1]
        runtime.synchronize_stream(runtime.compute_stream())
        device = getattr(engine.device, "inner", engine.device)
        for operation in getattr(device, "merged", ()):
            known = operation.span is not None or operation.end is None or runtime.query(operation.end)
            assert known or not isinstance(operation, Operation), f"merged before {operation.kind} was done"

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "open_runtime", open_runtime)
        patch.setattr(gpu, "CudaDevice", OnFake)
        patch.setattr(apexk.engine.layer, "join", joined)
        yield made


def left(runtime):
    """What was made on a runtime and not given back."""
    counters = ("streams", "events", "registrations")
    return {name: runtime.count(name) for name in counters if runtime.count(name)}
