"""A machine without Triton can import every public module; only a launch needs it, and says what it wants."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
from apexk.kernels.triton import checks, combine, grouped_gemm, moe_ffn, permute, reference, routing, tune
ids = torch.zeros(2, 2, dtype=torch.int64)
try:
    routing.route(ids, None, 4)
except ImportError:
    print("needs triton")
del sys.modules["triton"]
try:
    routing.route(ids, None, 4)
except ValueError as error:
    print(error)
"""


def test_import_without_triton_and_launch_without_gpu():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    first, second = done.stdout.splitlines() or ["", ""]
    assert first == "needs triton", done.stderr
    assert second.startswith("tensors are on cpu, wanted a CUDA device"), done.stderr
