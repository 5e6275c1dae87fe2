"""What the suite runs on: versions, GPU, host, and the commit of the source tree."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "numpy", "cupy-cuda12x", "nvtx")


def environment() -> dict:
    """JSON values; a thing that is not there is None."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": _gpu(),
        "cpu": _cpu(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> dict | None:
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    query = _output("nvidia-smi", "--id=0", "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm",
                    "--format=csv,noheader")  # fmt: skip
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "processors": facts.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver, link generation, link width, clock": query,
    }


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
