"""Settings of the whole suite: seeds, the Triton interpreter where there is no GPU, and checks after each test."""

import os
import shutil
import threading
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, and other packages import Triton

torch.set_num_threads(1)  # the suite's products are tiny, and two threads on a busy machine wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same in the processes that it starts

# no example is refused for the time it takes, and a run that passed passes again; nightly runs draw other examples each time
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_configure(config):
    settings.load_profile("nightly" if config.option.markexpr == "nightly" else "steady")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_thread_left():
    """What a test starts it also stops: no Python thread outlives it."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in left:  # a pool that nobody holds any more ends its threads, but not at once
        thread.join(timeout=30)
    left = [t.name for t in left if t.is_alive()]
    assert not left, f"threads still running: {left}"


def tasks() -> set[str]:
    """This process's threads, native ones too, as the system lists them."""
    return set(os.listdir("/proc/self/task"))


@pytest.fixture
def native_threads():
    """`ended = native_threads()`, and later `ended()`: no thread is left that has begun since."""

    def now():
        before = tasks()

        def ended() -> bool:
            deadline = time.monotonic() + 30  # one that was joined may be listed a moment longer
            while tasks() - before and time.monotonic() < deadline:
                time.sleep(0.001)
            return not tasks() - before

        return ended

    return now


@pytest.fixture
def assert_idle():
    """`assert_idle()`: soon there is a fifth of a second in which the process takes no processor time, so its threads sleep."""

    def look() -> None:
        deadline = time.monotonic() + 30  # a thread that spins for a bounded time may have to wait for a processor
        while True:
            before = time.process_time()
            time.sleep(0.2)
            took = time.process_time() - before
            if took < 0.02:
                return
            assert time.monotonic() < deadline, f"{took:.3f} s of processor time in 0.2 s"

    return look


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def trained():
    """`trained(dtype) -> (model, tokenizer)`: the shipped model, one a session and dtype. Leave it as it was."""
    from apexk.demo import model

    loaded = {}

    def get(dtype=torch.float32):
        if dtype not in loaded:
            loaded[dtype] = model.load(dtype)
        return loaded[dtype]

    return get


#: what a machine may lack -> (is it there, what is not covered without it)
OPTIONAL = {
    "a CUDA device": (torch.cuda.is_available, "kernels and engine on a GPU"),
    "a C++ compiler": (lambda: shutil.which(os.environ.get("CXX", "g++")) is not None, "the native tests"),
}


def pytest_terminal_summary(terminalreporter):
    missing = {name: what for name, (there, what) in OPTIONAL.items() if not there()}
    if missing:
        terminalreporter.section("not covered on this machine", sep="!", yellow=True)
        for name, what in missing.items():
            terminalreporter.line(f"without {name}: {what}")
