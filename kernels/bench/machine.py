"""Where a figure was made: versions, devices, commit. Every row of a benchmark carries it."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


@functools.cache
def facts() -> dict:
    """What does not change during a run."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _dirty(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton"), "cuda": torch.version.cuda},
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
    }  # fmt: skip


def device_facts(device) -> dict:
    """Name of the device, and its clocks where they can be asked for."""
    if device == "cpu":
        return {"device": facts()["cpu"], "clocks_mhz": None}
    return {"device": torch.cuda.get_device_name(0), "clocks_mhz": _gpu_clocks()}


def _gpu_clocks():
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        sm, memory = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split(",")
        return {"sm": int(sm), "memory": int(memory)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _dirty():
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
