"""The shapes of real models, as numbers. Imports no torch, so that a name that there is none of is refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A real model's numbers. `layers` are all decoder layers; `config`: what differs from the configuration class's defaults;
    `source`: where the numbers are from."""

    model: str
    model_type: str
    hidden: int
    moe_intermediate: int
    num_experts: int
    top_k: int
    layers: int
    moe_layers: int
    shared_experts: int
    bytes_per_expert: int
    config: dict
    source: str


def shapes() -> dict[str, Shape]:
    """short name ("qwen3.5-35b-a3b") -> shape."""
    listed = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))["models"]
    return {item["model"].split("/")[-1].lower(): Shape(**item) for item in listed}


def shape_of(name: str, layers: int | None = None) -> Shape:
    """The named shape. Raises ValueError for an unknown name, or a number of sparse layers that the model does not have."""
    known = shapes()
    shape = known.get(name.lower())
    if shape is None:
        raise ValueError(f"no shape named {name!r}; there are {', '.join(known)}")
    if layers is not None and not 1 <= layers <= shape.moe_layers:
        raise ValueError(f"layers is {layers}; {shape.model} has {shape.moe_layers} sparse layers: wanted 1..{shape.moe_layers}")
    return shape
