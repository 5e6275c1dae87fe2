"""Triton kernels on whatever is there: a GPU, or the interpreter on CPU tensors (repaired by tests/triton_interpreter.py).

Layers are those of `apexk.kernels.bench.poisoned`.
"""

import functools
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from apexk.kernels.bench import poisoned

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: before any kernel file is imported


@pytest.fixture(scope="session")
def device():
    """Where the kernels run: "cuda", or "cpu" with the interpreter ready."""
    if ON_GPU:
        return "cuda"
    pytest.importorskip("triton")
    path = Path(__file__).parents[2] / "triton_interpreter.py"
    spec = importlib.util.spec_from_file_location("triton_interpreter", path)
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    shim.install()
    return "cpu"


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)


@pytest.fixture
def guard(device):
    """`guard(tensor)`: a copy on the device between two bands; the bands are compared when the test ends."""
    put = poisoned.Guard(device)
    yield put
    put.compare()


@pytest.fixture
def make_layer(guard, rng):
    return functools.partial(poisoned.build_layer, guard, rng)


@pytest.fixture
def close():
    return poisoned.compare
