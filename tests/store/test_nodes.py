"""Experts over memory nodes: which nodes, on machines made of files, and which bytes go where; and what this kernel says of it."""

import ctypes
import logging
import mmap
import platform
import re
from pathlib import Path

import pytest
import torch

from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore, anonymous
from apexk.store.nodes import MBIND, prefer, usable_nodes

BLOCK = ExpertBlock(40, 24, torch.float32)  # 12,288 bytes a block

KNOWS = pytest.mark.skipif(
    platform.machine() not in MBIND or not Path("/proc/self/numa_maps").exists(), reason="no memory policies in this kernel")


def machine(folder, nodes, *, memory="0-3", allowed="0-3", processors="0-7"):
    """`nodes`: id -> its processors."""
    files = {"proc/thread-self/status": f"Name:\tx\nCpus_allowed_list:\t{processors}\nMems_allowed:\tf\nMems_allowed_list:\t{allowed}\n",
             "sys/devices/system/node/has_memory": f"{memory}\n"}
    files |= {f"sys/devices/system/node/node{node}/cpulist": f"{cpus}\n" for node, cpus in nodes.items()}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return str(folder)


@pytest.mark.parametrize("nodes, limits, wanted", [
    pytest.param({0: "0-3", 1: "4-7"}, {}, [0, 1], id="two"),
    pytest.param({0: "0-7"}, {}, [0], id="one"),
    pytest.param({0: "0-1,4", 3: "5-7"}, {}, [0, 3], id="with a gap"),
    pytest.param({0: "0-3", 1: "4-7", 2: ""}, {}, [0, 1], id="memory without processors, as on some accelerators"),
    pytest.param({0: "0-3", 1: "4-7"}, {"memory": "1"}, [1], id="processors without memory"),
    pytest.param({0: "0-3", 1: "4-7"}, {"allowed": "0"}, [0], id="a control group with one node's memory"),
    pytest.param({0: "0-3", 1: "4-7"}, {"processors": "4-6"}, [1], id="a mask with one node's processors"),
])  # fmt: skip
def test_usable_nodes(tmp_path, nodes, limits, wanted):
    assert usable_nodes(machine(tmp_path, nodes, **limits)) == wanted


def test_nothing_known_is_no_node(tmp_path):
    assert usable_nodes(str(tmp_path)) == []


@pytest.mark.parametrize("experts, ids", [(8, (0, 1)), (5, (0, 2)), (7, (0, 1, 3)), (1, (0, 1))])
def test_every_block_has_one_node_and_nodes_have_their_share(tmp_path, experts, ids):
    asked = []
    root = machine(tmp_path, {node: str(node) for node in ids})
    store = HostStore(3, experts, BLOCK, root=root, bind=lambda *what: asked.append(what))
    assert store.nodes == list(ids)
    for layer in range(3):
        held = dict.fromkeys(ids, 0)
        for address in store.addresses(layer).tolist():
            (node,) = {n for start, size, n in asked if start <= address and address + BLOCK.stride_bytes <= start + size}
            held[node] += 1
        assert max(held.values()) - min(held.values()) <= 1
    assert sum(size for _, size, _ in asked) == store.nbytes
    assert all(start % mmap.PAGESIZE == 0 == size % mmap.PAGESIZE for start, size, _ in asked)


def test_one_node_is_left_to_the_system(tmp_path):
    def refuse(*_):
        raise AssertionError("nothing to choose from")

    assert HostStore(1, 4, BLOCK, root=machine(tmp_path, {0: "0-7"}), bind=refuse).nodes == []


def test_a_kernel_that_refuses_is_said_once_and_the_store_works(tmp_path, caplog):
    def refuse(*_):
        raise OSError(1, "mbind: not permitted")

    with caplog.at_level(logging.WARNING, "apexk.store"):
        store = HostStore(2, 4, BLOCK, root=machine(tmp_path, {0: "0", 1: "1"}), bind=refuse)
    assert store.nodes == [] and [record.getMessage().count("not permitted") for record in caplog.records] == [1]
    weights = torch.randn(4, 48, 40), torch.randn(4, 40, 24)
    store.put(1, *weights)
    assert torch.equal(store.w13(1), weights[0]) and torch.equal(store.w2(1), weights[1])


@KNOWS
def test_the_kernel_takes_the_wish():
    (node, *_) = usable_nodes()
    memory = anonymous(4 * mmap.PAGESIZE)
    address = ctypes.addressof((ctypes.c_char * 0).from_buffer(memory))
    prefer(address + mmap.PAGESIZE, 2 * mmap.PAGESIZE, node)
    policies = dict(re.findall(r"^([0-9a-f]+) (\S+)", Path("/proc/self/numa_maps").read_text(), re.M))
    assert policies[f"{address + mmap.PAGESIZE:x}"].startswith(f"prefer:{node}")
    assert policies[f"{address + 3 * mmap.PAGESIZE:x}"] == "default"


@KNOWS
def test_a_node_that_is_not_there_is_an_error():
    memory = anonymous(mmap.PAGESIZE)
    with pytest.raises(OSError, match="memory node 1000"):
        prefer(ctypes.addressof((ctypes.c_char * 0).from_buffer(memory)), mmap.PAGESIZE, 1000)
