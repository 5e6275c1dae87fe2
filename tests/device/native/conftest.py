"""A fake CUDA runtime for each test, and what is left of it afterwards."""

import pytest
import torch

from apexk.device.native.channel import Channel, Copy
from apexk.device.native.fake import FakeCuda


@pytest.fixture(autouse=True)
def no_native_thread_left(native_threads):
    """Threads of the channel, the hand-off, the streams and the CPU pool end with their owners."""
    ended = native_threads()
    yield
    assert ended()


@pytest.fixture
def make_runtime():
    """`make_runtime(**settings)`: a `FakeCuda`, closed after the test."""
    made = []

    def make(**settings) -> FakeCuda:
        made.append(FakeCuda(**settings))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


class Bench:
    """A channel, `count` random blocks in pinned memory, as many slots full of zeros, and copies by number."""

    def __init__(self, runtime: FakeCuda, count: int = 6, nbytes: int = 4096, **settings):
        self.runtime = runtime
        self.stream = runtime.new_stream("h2d")
        self.blocks = runtime.empty_pinned((count, nbytes), torch.uint8).random_(1, 255)
        self.slots = runtime.empty_device((count, nbytes), torch.uint8).zero_()
        self.events = [runtime.new_event(timing=True) for _ in range(2 * count)]
        self.channel = Channel(runtime, self.stream, **settings)

    def copy(self, number: int, layer: int = 0, slot: int | None = None, after=None) -> Copy:
        slot = number if slot is None else slot
        return Copy(number, layer, self.slots[slot].data_ptr(), self.blocks[number].data_ptr(), self.blocks.shape[1],
                    self.events[number], self.events[number + len(self.blocks)], after)

    def exact(self, *copies: Copy) -> list[int]:
        """Between the start of the first and the end of the last."""
        return self.channel.copy(copies, copies[-1].done, copies[0].start)

    def holds(self, slot: int, number: int) -> bool:
        return torch.equal(self.slots[slot], self.blocks[number])


@pytest.fixture
def make_bench(make_runtime):
    """`make_bench(count, nbytes, runtime={...}, **channel settings)`."""
    made = []

    def make(count: int = 6, nbytes: int = 4096, *, runtime=None, **settings) -> Bench:
        made.append(Bench(make_runtime(**(runtime or {})), count, nbytes, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.channel.close()
