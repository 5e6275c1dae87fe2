"""Memory limits, read from folders that look like /proc and /sys."""

import pytest

from apexk.machine import memory

GIB = 1 << 30


def machine(root, *, available=8, cgroup="", files=()):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {available * GIB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files:
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def test_without_limits_the_machine_counts(tmp_path):
    found = memory.rooms(machine(tmp_path))
    assert [(room.free, room.total) for room in found] == [(8 * GIB, 16 * GIB)]
    memory.require({"experts": 8 * GIB}, tmp_path)
    with pytest.raises(MemoryError, match=r"9.00 GiB of host memory are needed \(experts 6.00, dense 3.00\); the machine \(MemAvailable\) leaves 8.00 of 16.00 GiB"):
        memory.require({"experts": 6 * GIB, "dense": 3 * GIB, "pool": 0}, tmp_path)


def test_control_groups_version_2(tmp_path):
    """The tightest group above counts; its page cache is given back when memory is needed."""
    root = machine(tmp_path, cgroup="0::/pod/app\n", files=[
        ("pod/app/memory.max", "max"), ("pod/app/memory.current", GIB),
        ("pod/memory.max", 4 * GIB), ("pod/memory.current", 3 * GIB), ("pod/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n"),
    ])  # fmt: skip
    first = memory.rooms(root)[0]
    assert (first.free, first.total) == (3 * GIB, 4 * GIB) and first.source.endswith("sys/fs/cgroup/pod/memory.max")


def test_control_groups_version_1(tmp_path):
    root = machine(tmp_path, cgroup="5:cpu:/x\n4:memory:/box\n0::/\n", files=[
        ("memory/box/memory.limit_in_bytes", 2 * GIB), ("memory/box/memory.usage_in_bytes", GIB), ("memory/box/memory.stat", "total_inactive_file 0\n"),
        ("memory/memory.limit_in_bytes", 9223372036854771712), ("memory/memory.usage_in_bytes", 5 * GIB),
    ])  # fmt: skip
    assert [(room.free, room.total) for room in memory.rooms(root)] == [(GIB, 2 * GIB), (8 * GIB, 16 * GIB)]


def test_a_group_that_is_full(tmp_path):
    root = machine(tmp_path, cgroup="0::/\n", files=[("memory.max", GIB), ("memory.current", 2 * GIB)])
    assert memory.rooms(root)[0].free == 0


def test_where_nothing_is_known_nothing_is_refused(tmp_path):
    assert memory.rooms(tmp_path) == []
    memory.require({"experts": 1 << 60}, tmp_path)


def test_this_machine_has_some():
    assert memory.rooms()[0].free > 0
