"""A machine without Triton can import every public module; only a launch needs it."""

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
"""


def test_public_modules_import_without_triton():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "needs triton", done.stderr


def test_cpu_tensors_without_interpreter_are_refused():
    program = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch
from apexk.kernels.triton import routing
try:
    routing.route(torch.zeros(2, 2, dtype=torch.int64), None, 4)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("tensors are on cpu, wanted a CUDA device"), done.stderr
