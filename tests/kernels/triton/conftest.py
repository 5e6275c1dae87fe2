"""Triton kernels on whatever is there: a GPU, or the interpreter on CPU tensors (repaired by tests/triton_interpreter.py)."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

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
