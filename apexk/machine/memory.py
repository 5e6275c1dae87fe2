"""How much memory this process may still take, and what says so."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """`free` bytes of `total`, according to `source`."""

    source: str
    free: int
    total: int


def rooms(root: Path = Path("/")) -> list[Room]:
    """Every limit that is known, the tightest first. `root`: where /proc and /sys are looked for."""
    found = [room for room in (_host(root), *_groups(root), _address_space(root)) if room is not None]
    return sorted(found, key=lambda room: room.free)


def require(needs: dict[str, int], root: Path = Path("/")) -> None:
    """Raises MemoryError if the sum of `needs` (what for -> bytes) is more than the tightest limit leaves free."""
    wanted = sum(needs.values())
    found = rooms(root)
    if found and wanted > found[0].free:
        parts = ", ".join(f"{what} {nbytes / GIB:.2f}" for what, nbytes in needs.items() if nbytes)
        raise MemoryError(f"{wanted / GIB:.2f} GiB of host memory are needed ({parts}); {found[0].source} leaves {found[0].free / GIB:.2f} of "
                          f"{found[0].total / GIB:.2f} GiB")


def _host(root: Path) -> Room | None:
    lines = _words(root / "proc/meminfo")
    if "MemAvailable:" not in lines:
        return None
    return Room("the machine (MemAvailable)", lines["MemAvailable:"] * 1024, lines["MemTotal:"] * 1024)


def _groups(root: Path) -> list[Room]:
    """Limits of the control groups (version 1 and 2) that this process is in, up to the root of the hierarchy."""
    try:
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in own:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            room = _group(mount.joinpath(*parts[:depth]), *names)
            if room is not None:
                found.append(room)
    return found


def _group(folder: Path, limit: str, usage: str, inactive: str, active: str) -> Room | None:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None or most >= 1 << 60:  # no limit
        return None
    stat = _words(folder / "memory.stat")
    cached = stat.get(inactive, 0) + stat.get(active, 0)  # the page cache gives way
    return Room(f"the control group {folder / limit}", max(0, most - max(0, used - cached)), most)


def _address_space(root: Path) -> Room | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        used = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        used = 0
    return Room("the address space limit (ulimit -v)", max(0, most - used), most)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max": no limit
        return None


def _words(path: Path) -> dict[str, int]:
    """`name number` lines of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdigit()}
