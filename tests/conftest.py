"""Settings of the whole suite: seeds, the Triton interpreter where there is no GPU, and checks after each test."""

import os
import shutil
import threading

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, and other packages import Triton

torch.set_num_threads(1)  # the suite's products are tiny, and two threads on a busy machine wait for each other



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
        thread.join(timeout=2)
    left = [t.name for t in left if t.is_alive()]
    assert not left, f"threads still running: {left}"


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
