"""Which memory node holds which experts: where there are several, each gets a run of every layer's experts.

The CPU kernels' threads stay on their node and take the work first whose weights lie there. Left to the system, a page
lies on the node of the thread that first wrote it: all weights on one node where one thread loaded them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
PREFERRED = 1  # MPOL_PREFERRED: of another node where this one is full
MASK_BITS = 1024

Bind = Callable[[int, int, int], None]  # (address, bytes, node); OSError


def usable_nodes(root: str = "") -> list[int]:
    """Memory nodes that this process may take memory from and compute on; none where that is not known. `root`: a folder with
    copies of /proc and /sys files."""
    folder, status = Path(f"{root}/sys/devices/system/node"), {}
    for line in _text(Path(f"{root}/proc/thread-self/status")).splitlines():
        key, _, value = line.partition(":")
        status[key] = _listed(value)
    processors, allowed = status.get("Cpus_allowed_list", set()), status.get("Mems_allowed_list", set())
    nodes = _listed(_text(folder / "has_memory")) & allowed
    return sorted(node for node in nodes if _listed(_text(folder / f"node{node}" / "cpulist")) & processors)


def spread(memory: mmap.mmap, experts: int, nodes: list[int], bind: Bind) -> None:
    """Gives each node its run of the `experts` blocks that fill `memory`, before a page of it is written."""
    view = (ctypes.c_char * 0).from_buffer(memory)
    start, block = ctypes.addressof(view), len(memory) // experts
    for place, node in enumerate(nodes):
        first, end = (n * experts // len(nodes) for n in (place, place + 1))
        if end > first:
            bind(start + first * block, (end - first) * block, node)


def prefer(address: int, nbytes: int, node: int) -> None:
    """Pages of this memory will be taken from `node`. Raises OSError."""
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"mbind: not known for {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (MASK_BITS // bits))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = map(ctypes.c_long, (number, address, nbytes, PREFERRED, ctypes.addressof(mask), MASK_BITS, 0))
    if libc.syscall(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind of {nbytes} bytes to memory node {node}: {os.strerror(code)}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _listed(text: str) -> set[int]:
    """"0-2,5" -> 0, 1, 2, 5; nothing where it is no list."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
