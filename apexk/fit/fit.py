"""`fit`: what a model needs of the host and of the GPU, which pools fit, and how fast that would be, modelled."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from apexk import hardware
from apexk.config import ApexConfig
from apexk.hf.gpu import OF_TOTAL, row_bytes
from apexk.hf.inspect import Experts, find_experts
from apexk.hf.kv import kv_bytes
from apexk.hf.loader.headers import INDEX, SINGLE
from apexk.hf.loader.load import dense_bytes, inspect
from apexk.hf.loader.skeleton import read_config, skeleton, unquantized
from apexk.machine import memory
from apexk.sim.cells import figures, scaled
from apexk.sim.demand import demand_of
from apexk.sim.generate import Shape, generate
from apexk.sim.run import simulate
from apexk.store.block import ExpertBlock
from apexk.store.capacity import Capacity, PoolSize, Room, resolve
from apexk.testing.real import real_config
from apexk.testing.shapes import shapes

POLICIES = ("no_assign", "ea_only", "apex")
STEPS, WARMUP = 30, 10


@dataclass(frozen=True)
class Subject:
    """What is asked about. `model`: a skeleton. `files`: facts of the checkpoint, None where there is only a configuration."""

    name: str
    model: PreTrainedModel
    experts: Experts
    block: ExpertBlock
    dense: int
    files: dict | None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's warnings: they are of how a pass would run, and here none does."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def subject(model: str, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Subject:
    """`model`: a local folder with a configuration, with or without weights, or the name of a known shape."""
    folder = Path(model)
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        found = inspect(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        pieces = found.plan.pieces
        kinds = sorted({piece.tensor.kind for piece in pieces})
        files = {"bytes": found.plan.expert_bytes + sum(t.nbytes for t in found.plan.dense), "files": len({p.tensor.first.file for p in pieces}),
                 "expert_tensors": len(pieces), "experts_stored": ", ".join(kinds), "left_out": len(found.plan.skipped)}
        return Subject(folder.name, found.model, found.experts, found.block, found.dense_bytes, files)
    if not folder.is_dir() and model.lower() not in shapes():
        raise ValueError(f"{model}: no such folder, and no known shape; there are {', '.join(shapes())}")
    config = read_config(folder, trust_remote_code) if folder.is_dir() else real_config(model)
    built = skeleton(unquantized(config), dtype or getattr(config, "dtype", None) or torch.bfloat16, trust_remote_code)
    experts = find_experts(built)
    block = ExpertBlock(experts.hidden, experts.intermediate, experts.dtype, experts.biases)
    return Subject(model, built, experts, block, dense_bytes(built, experts), None)


def fit(about: Subject, *, machine: str = "a6000-paper", gpu_bytes: int | None = None, context: int = 8192, batch: int = 1, root: Path = Path("/")) -> dict:
    """Bytes, slots and modelled speeds. `gpu_bytes`: the GPU's whole memory; None: torch's device, if there is one.
    `context`: tokens a sequence, `batch`: sequences at once. Raises ValueError for a number that is none."""
    for what, value in (("context", context), ("batch", batch), ("gpu_bytes", gpu_bytes)):
        if (value is not None or what != "gpu_bytes") and (type(value) is not int or value < 1):
            raise ValueError(f"{what} is {value!r}; wanted a whole number, at least 1")
    experts, block = about.experts, about.block
    layers = len(experts.blocks)
    store = layers * experts.experts * block.stride_bytes
    rooms = memory.rooms(root)
    host = {"experts": store, "dense": about.dense, "needed": store + about.dense}
    if rooms:
        host |= {"free": rooms[0].free, "limited_by": rooms[0].source, "fits": store + about.dense <= rooms[0].free}
    pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free, source = _gpu(gpu_bytes)
    kept = {
        "dense": about.dense,
        "kv_cache": kv_bytes(about.model, experts, batch, context),
        "expert_rows": row_bytes(experts, ApexConfig().part_tokens),
        "activations_and_libraries": round(OF_TOTAL * free) if free else 0,
    }
    automatic = resolve(PoolSize(), layers, experts.experts, block.stride_bytes, room=Room(free, kept)) if free else None
    pools = sorted({0, experts.topk, experts.experts // 4, experts.experts // 2, experts.experts, *([automatic.slots] if automatic else [])})
    speeds = modelled(experts, block, machine, pools, batch)
    rows = []
    for pool in pools:
        needed = sum(kept.values()) + pool * layers * block.stride_bytes
        rows.append({"pool": pool, "gpu_bytes": needed, "fits": needed <= free if free else None, "tokens_per_s": speeds[pool]})
    return {
        "model": {"name": about.name, "model_type": experts.model_type, "moe_layers": layers, "experts": experts.experts, "topk": experts.topk,
                  "hidden": experts.hidden, "intermediate": experts.intermediate, "dtype": str(experts.dtype).removeprefix("torch."),
                  "bytes_per_expert": block.payload_bytes},
        "checkpoint": about.files, "host": host,
        "pinning": {"limit": None if pinned == resource.RLIM_INFINITY else pinned, "needed": store,
                    "fits": pinned == resource.RLIM_INFINITY or store <= pinned},
        "gpu": {"bytes": free, "source": source, "context": context, "batch": batch, **kept}, "pools": rows,
        "hardware": machine, "modelled": True,
        "suggested": _suggestion(host, rows, free, automatic, speeds),
    }  # fmt: skip


def modelled(experts: Experts, block: ExpertBlock, machine: str, pools: list[int], batch: int) -> dict[int, dict[str, float]]:
    """pool -> policy -> decode tokens/s on a generated trace. Costs per expert are scaled by its bytes, an assumption."""
    costs = scaled(hardware.load(machine), block.payload_bytes)
    shape = Shape(experts.model_type, len(experts.blocks), experts.experts, experts.topk)
    demand = demand_of(generate("mmlu-like", shape=shape, batch=batch, steps=STEPS))
    return {pool: {policy: figures(simulate(demand, costs, policy, pool, warmup=WARMUP))["tokens_per_s"] for policy in POLICIES} for pool in pools}


def _gpu(given: int | None) -> tuple[int | None, str]:
    if given is not None:
        return given, "given"
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0], f"free on {torch.cuda.get_device_name()}"
    return None, "no GPU here, none given"


def _suggestion(host: dict, rows: list[dict], free: int | None, automatic: Capacity | None, speeds: dict) -> dict:
    """Settings of `ApexConfig`, and why; where the host is too small no setting helps, and `host_bytes` is what one would need."""
    if not host.get("fits", True):
        why = f"the experts stay in host memory whatever the pool, and here {host['limited_by']} leaves too little"
        if free is not None and not any(row["fits"] for row in rows):
            why += f"; the GPU is too small as well: it would need {rows[0]['gpu_bytes'] / 2**30:.2f} GiB without any slot"
        return {"host_bytes": host["needed"], "why": why}
    if free is None:
        return {"device": "cpu", "why": "no GPU here; --gpu-memory asks about one that is elsewhere"}
    if not any(row["fits"] for row in rows):
        return {"device": "cpu", "why": "the dense part and the cache alone do not fit on the GPU"}
    best = max(speeds[automatic.slots], key=speeds[automatic.slots].get)
    return {"pool": automatic.slots, "policy": best, "why": f"{automatic.arithmetic}; fastest of {', '.join(POLICIES)} there, modelled"}
