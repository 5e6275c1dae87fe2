"""`load`: a checkpoint's dense part as transformers loads it, its experts straight into the host store, and the model swapped."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from apexk import hardware
from apexk.config import ApexConfig
from apexk.hf.handle import Handle
from apexk.hf.inspect import Experts, UnsupportedModel, find_experts
from apexk.hf.loader.codec import Tensor, tensors
from apexk.hf.loader.fill import Reader, fill
from apexk.hf.loader.headers import CheckpointError, read_headers
from apexk.hf.loader.plan import Plan, make_plan
from apexk.hf.loader.skeleton import (
    add_placeholders,
    quiet_transformers,
    read_config,
    skeleton,
    unquantized,
    without_parameters,
)
from apexk.hf.swap import take_over
from apexk.machine import memory
from apexk.store.block import DTYPES, ExpertBlock
from apexk.store.host_store import HostStore

log = logging.getLogger("apexk.hf.loader")


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before a weight is read. `model` is a skeleton; `block` one expert as it will be kept."""

    folder: Path
    config: PretrainedConfig
    model: PreTrainedModel
    experts: Experts
    plan: Plan
    block: ExpertBlock

    @property
    def store_bytes(self) -> int:
        return len(self.experts.blocks) * self.experts.experts * self.block.stride_bytes

    @property
    def dense_bytes(self) -> int:
        return dense_bytes(self.model, self.experts)


def dense_bytes(model: PreTrainedModel, experts: Experts) -> int:
    """Of the parameters that are no expert's; tied ones count once."""
    inside = {id(p) for layer in range(len(experts.blocks)) for p in experts.weights(layer).parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)


def inspect(path: str | os.PathLike, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Reads the configuration and the safetensors headers of a local folder, and checks that they fit.

    Raises `CheckpointError` or `UnsupportedModel`.
    """
    folder = Path(path)
    stored = read_headers(folder)
    config = read_config(folder, trust_remote_code)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):  # before so many are built
        raise CheckpointError(f"{folder / 'config.json'} wants {layers} layers, but the checkpoint holds {len(stored)} tensors")
    quantization = getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    found = tensors(stored, quantization)
    dtype = _dtype(config, dtype, found)
    model = skeleton(unquantized(config), dtype, trust_remote_code)
    experts = find_experts(model)
    _refuse_shared_classes(model, experts)
    plan = make_plan(model, experts, found)
    block = ExpertBlock(experts.hidden, experts.intermediate, experts.dtype, experts.biases)
    return Checkpoint(folder, config, model, experts, plan, block)


def load(path: str | os.PathLike, config: ApexConfig | None = None, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False,
         progress: bool = True) -> tuple[PreTrainedModel, Handle]:
    """Loads the safetensors checkpoint in the local folder `path` and swaps the model: `(model, handle)`.

    Experts are read once, to where they stay, so that the host needs the experts' bytes, the dense part, and little
    else. `dtype`: float32, bfloat16 or float16; default the configuration's. FP8 (block scales) and MXFP4 checkpoints
    become `dtype` while they are read. Code in the folder runs only with `trust_remote_code`. `progress`: a bar on a terminal's stderr.
    `handle.restore()` gives the plain model, as `from_pretrained` would have.

    Raises `CheckpointError` (a ValueError) naming a missing, cut off, duplicated or mis-shaped tensor, `UnsupportedModel`, and
    MemoryError before anything is read if the host or its control group has too little room.
    """
    config = config or ApexConfig()
    if not isinstance(config, ApexConfig):
        raise TypeError(f"config is {type(config).__name__}, wanted ApexConfig")
    hardware.load(config.hardware)  # a bad name is refused before minutes of reading
    checkpoint = inspect(path, dtype=dtype, trust_remote_code=trust_remote_code)
    experts, plan = checkpoint.experts, checkpoint.plan
    layers, stride = len(experts.blocks), checkpoint.block.stride_bytes
    pool = layers * config.capacity(layers, experts.experts, stride).slots * stride if config.device == "virtual" else 0
    memory.require({"experts": checkpoint.store_bytes, "dense part": checkpoint.dense_bytes, "pool, kept on the host by device 'virtual'": pool})
    if plan.skipped:
        log.info("%d tensors are left out, as %s: the model has no place for them", len(plan.skipped), plan.skipped[0])
    reader = Reader()
    try:
        model = _load_dense(checkpoint, reader)
        store = HostStore(len(experts.blocks), experts.experts, checkpoint.block)
        began = time.perf_counter()
        with tqdm(total=plan.expert_bytes, desc="experts", unit="B", unit_scale=True, disable=None if progress else True) as bar:
            fill(store, experts, plan.pieces, reader, bar.update)
        seconds = time.perf_counter() - began
        log.info("%.2f GB of experts in %.2f s, %.2f GB/s", plan.expert_bytes / 1e9, seconds, plan.expert_bytes / 1e9 / seconds)
    finally:
        reader.close()
    return model, take_over(model, config, store)


def _load_dense(checkpoint: Checkpoint, reader: Reader) -> PreTrainedModel:
    """The model without its experts' values, by the library's own loading."""
    like = checkpoint.model
    places = {name: part for name, part in _expert_modules(checkpoint.experts)}
    state = {tensor.name: Lazy(tensor, reader) for tensor in checkpoint.plan.dense}
    with quiet_transformers(), without_parameters({type(part) for part in places.values()}):  # its report of a faulty checkpoint is ours, below
        model, told = type(like).from_pretrained(None, config=like.config, state_dict=state, dtype=checkpoint.block.dtype,
                                                 output_loading_info=True, ignore_mismatched_sizes=True)
    if told["mismatched_keys"]:
        name, came, wanted = sorted(told["mismatched_keys"])[0]
        raise CheckpointError(f"{name} has shape {list(came)}, the configuration wants {list(wanted)}")
    if told["missing_keys"]:
        names = sorted(told["missing_keys"])
        raise CheckpointError(f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} missing from {checkpoint.folder}")
    for name, part in places.items():
        add_placeholders(model.get_submodule(name), dict(part._parameters))
    model._weight_conversions = checkpoint.plan.conversions  # so that save_pretrained writes the format that was read
    model.config.name_or_path = model.name_or_path = str(checkpoint.folder)
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    return model


class Lazy:
    """A tensor that is read when the library asks for its values."""

    def __init__(self, tensor: Tensor, reader: Reader):
        self._tensor, self._reader = tensor, reader

    def __getitem__(self, _) -> torch.Tensor:
        return self._tensor.values(self._reader.read)


def _expert_modules(experts: Experts) -> list[tuple[str, nn.Module]]:
    """(name, module) of everything that owns expert parameters."""
    found = []
    for layer, name in enumerate(experts.names):
        weights = experts.weights(layer)
        for inner, part in weights.named_modules():
            if part._parameters:
                found.append((".".join(filter(None, (name, experts.family.experts, inner))), part))
    return found


def _refuse_shared_classes(model: PreTrainedModel, experts: Experts) -> None:
    """Parameters are left out class by class: the classes of experts must hold nothing else."""
    inside = {id(part) for _, part in _expert_modules(experts)}
    classes = {type(part) for _, part in _expert_modules(experts)}
    for name, module in model.named_modules():
        if type(module) in classes and id(module) not in inside:
            raise UnsupportedModel(f"{name} is a {type(module).__name__} as experts are: load this model with from_pretrained, then swap")


def _dtype(config: PretrainedConfig, dtype: torch.dtype | None, found: list[Tensor]) -> torch.dtype:
    """What is asked for, else what the configuration says, else what the first plain tensor of floating point is stored in."""
    if dtype is None:
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if dtype is None:
        dtype = next((t.first.dtype for t in found if t.kind == "plain" and t.first.dtype in DTYPES), torch.bfloat16)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; wanted {', '.join(str(d) for d in DTYPES)}")
    return dtype
