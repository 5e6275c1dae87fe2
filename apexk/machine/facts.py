"""Facts of this machine for people and reports: processors, locked memory, huge pages, where a PCI device is linked."""

from __future__ import annotations

import os
import resource
from pathlib import Path

#: what the CPU kernels' instruction sets need, as /proc/cpuinfo calls it
FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")


def processor(root: Path = Path("/")) -> dict:
    """Model name, flags of interest, and how many processors this process may run on."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines)) if value}
    flags = fields.get("flags", "").split()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": fields.get("model name"), "flags": [flag for flag in FLAGS if flag in flags], "processors": allowed}


def locked_memory() -> dict:
    """Bytes that may be pinned, None for no limit (`ulimit -l`)."""
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return {"soft": soft, "hard": hard}


def huge_pages(root: Path = Path("/")) -> str | None:
    """The chosen mode of transparent huge pages: always, madvise or never."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def link(bus: str, root: Path = Path("/")) -> dict:
    """The PCI link of a device ("0000:3b:00.0"): speed and width now, and at most."""
    folder = root / "sys/bus/pci/devices" / bus.lower()
    found = {}
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        try:
            found[name] = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            found[name] = None
    return found
