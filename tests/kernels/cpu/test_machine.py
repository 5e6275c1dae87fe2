"""How many threads a machine gets and where they stay, on machines made of files."""

import os
import platform
import time

import pytest
import torch

from apexk.kernels.cpu import library
from apexk.kernels.cpu.ffn import HostFFN


@pytest.fixture
def made(tmp_path):
    """A folder with the files of a machine: `made(cpus="0-7", siblings=2, nodes=["0-3", "4-7"], **{"sys/...": text})`."""

    def make(cpus: str, siblings: int = 1, nodes: tuple[str, ...] = (), **texts: str):
        files = {"proc/thread-self/status": f"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0\n"}
        for cpu in range(64):
            first = cpu // siblings * siblings
            files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{first}-{first + siblings - 1}\n"
        for i, processors in enumerate(nodes):
            files[f"sys/devices/system/node/node{i}/cpulist"] = f"{processors}\n"
        files["sys/devices/system/node/online"] = f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n"
        for path, text in {**files, **texts}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize("cpus, siblings, threads, limit", [
    pytest.param("0-7", 1, 8, 8, id="all"),
    pytest.param("0-7", 2, 4, 8, id="two processors a core: one thread each"),
    pytest.param("1,3-5", 2, 3, 4, id="a mask that takes half of some cores"),
    pytest.param("5", 1, 1, 1, id="one processor"),
    pytest.param("0-2,60-63", 1, 7, 7, id="a list of ranges"),
])  # fmt: skip
def test_affinity_and_cores(made, cpus, siblings, threads, limit):
    assert library.machine(str(made(cpus, siblings))) == (threads, limit, 1)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
QUOTAS = {
    "version 2": (3, {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "250000 100000\n"}),
    "version 2, none": (8, {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}),
    "version 2, a group above has less": (2, {
        "proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": "400000 100000\n", f"{V2}/a/cpu.max": "200000 100000\n"}),
    "version 2, path of the host in a container": (4, {"proc/self/cgroup": "0::/docker/1\n", f"{V2}/cpu.max": "400000 100000\n"}),
    "version 1": (5, {"proc/self/cgroup": "4:cpu,cpuacct:/\n1:memory:/x\n",
                      f"{V1}/cpu.cfs_quota_us": "450000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}),
    "version 1, none": (8, {"proc/self/cgroup": "4:cpuacct,cpu:/\n",
                            f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}),
    "version 1, in a group": (1, {"proc/self/cgroup": "4:cpu:/g\n",
                                  f"{V1}/g/cpu.cfs_quota_us": "5000\n", f"{V1}/g/cpu.cfs_period_us": "100000\n"}),
    "of another controller": (8, {"proc/self/cgroup": "4:cpuset:/\n", f"{V1}/cpu.cfs_quota_us": "100000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTAS)
def test_quota(made, name):
    threads, files = QUOTAS[name]
    assert library.machine(str(made("0-7", **files))) == (threads, threads, 1)


def test_no_files_at_all(tmp_path):
    machine = library.machine(str(tmp_path))
    assert 1 <= machine.threads == machine.limit and machine.nodes == 1


@pytest.mark.parametrize("cpus, nodes", [("0-7", 2), ("1-3", 1), ("3-4", 2)])
def test_nodes_without_a_usable_processor_do_not_count(made, cpus, nodes):
    assert library.machine(str(made(cpus, nodes=("0-3", "4-7")))).nodes == nodes


def test_too_many_threads_are_brought_down_and_said(made, caplog):
    with HostFFN(threads=5, root=made("0-1")) as ffn:
        assert ffn.threads == 2
    assert "5 CPU threads asked for" in caplog.text and "allow 2" in caplog.text
    caplog.clear()
    with HostFFN(threads=5, oversubscribe=True, root=made("0-1")) as ffn:
        assert ffn.threads == 5
    with HostFFN(threads=2, root=made("0-1")) as ffn:
        assert ffn.threads == 2
    assert not caplog.text


def test_default_is_one_thread_a_core(made):
    with HostFFN(root=made("0-3", 2)) as ffn:
        assert ffn.threads == 2


def allowed(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
        return next(line.split()[1] for line in file if line.startswith("Cpus_allowed_list"))


@pytest.mark.skipif(platform.system() != "Linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_threads_stay_on_their_node(case, made):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    before, one = set(os.listdir("/proc/self/task")), case(33, 100, 72)
    with HostFFN(threads=4, oversubscribe=True, root=made(f"{first},{second}", nodes=(str(first), str(second)))) as ffn:
        one.check(one.run(ffn))
        threads, wanted = set(os.listdir("/proc/self/task")) - before, sorted([str(first), str(second)] * 2)
        deadline = time.monotonic() + 30
        while sorted(map(allowed, threads)) != wanted and time.monotonic() < deadline:  # each goes there when it first runs
            time.sleep(0.001)
        for _ in range(20):
            assert torch.equal(one.run(ffn), one.out)
            ffn.submit(*one.arguments(), intermediate=72).wait()
        assert sorted(map(allowed, threads)) == wanted
