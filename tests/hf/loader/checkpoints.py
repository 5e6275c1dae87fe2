"""Checkpoints of tiny models, whole and broken, written tensor by tensor."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from apexk.testing.tiny import tiny


def write(folder: Path, model_type: str = "qwen3_moe", original: bool = True, dtype=torch.bfloat16, **changes):
    """A tiny model's checkpoint in `folder`; returns the model."""
    model = tiny(model_type, dtype=dtype, **changes)
    model.save_pretrained(folder, save_original_format=original)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Replaces the folder's tensors, in so many files."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {name: f"model-{1 + i * shards // len(names):05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def change_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def experts_init():
    return vars(Qwen3MoeExperts)["__init__"]


def open_checkpoints() -> list[str]:
    links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{n}")]
    return [link for link in links if link.endswith(".safetensors")]
