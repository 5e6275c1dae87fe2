"""The model families apexk knows, as data: where a sparse block keeps its parts and what its experts compute.

A family's router is a module that returns (logits, routing weights [T, topk], expert ids [T, topk]) for MoE inputs
[T, H]; its experts hold `gate_up_proj [E, 2I, H]` (gate rows, then up rows) and `down_proj [E, H, I]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Family:
    """`block`: class name of the sparse block; `router`, `experts`: its attributes."""

    model_type: str
    block: str
    router: str = "gate"
    experts: str = "experts"


FAMILIES = {family.model_type: family for family in (Family("qwen3_moe", "Qwen3MoeSparseMoeBlock"),)}

#: Hugging Face's `hidden_act` -> the kernels' name
ACTIVATIONS = {"silu": "silu", "swish": "silu"}


class UnsupportedModel(ValueError):
    """This model cannot be swapped; the text says why and what can."""


@dataclass(frozen=True)
class Experts:
    """A model's sparse blocks in layer order, with what they share."""

    family: Family
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    experts: int
    topk: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    activation: str

    def router(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.router)

    def weights(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.experts)


def find_experts(model: nn.Module) -> Experts:
    """The sparse blocks of `model`, checked. Raises `UnsupportedModel` or TypeError; changes nothing."""
    known = f"supported model types: {', '.join(FAMILIES)}"
    what = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedModel(f"{what} is no Hugging Face model with a config; {known}")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    family = FAMILIES.get(getattr(config, "model_type", None))
    if family is None:
        sparse = any("experts" in name.split(".") for name, _ in model.named_modules())
        why = "is a Mixture-of-Experts family that apexk does not know" if sparse else "is dense: it has no experts"
        raise UnsupportedModel(f"{what} (model type {getattr(config, 'model_type', None)!r}) {why}; {known}")
    if getattr(model.config, "quantization_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(f"{what} is quantised; apexk computes from float32, bfloat16 or float16 weights")
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ == family.block]
    if not found:
        raise UnsupportedModel(f"{what} has no {family.block}: every layer of this {family.model_type} is dense")
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModel(f"{what} uses hidden_act {config.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")
    shapes = {name: _check_block(family, name, block) for name, block in found}
    if len(set(shapes.values())) > 1:
        raise UnsupportedModel(f"{what}: sparse blocks differ in shape or dtype: {shapes}")
    (experts, hidden, intermediate, dtype), topk = next(iter(shapes.values())), config.num_experts_per_tok
    return Experts(family, tuple(n for n, _ in found), tuple(b for _, b in found), experts, topk, hidden, intermediate, dtype,
                   ACTIVATIONS[config.hidden_act])


def _check_block(family: Family, name: str, block: nn.Module) -> tuple:
    """-> (experts, hidden, intermediate, dtype) of one block."""
    if "forward" in vars(block):
        raise UnsupportedModel(f"{name}.forward is already replaced (swapped before, or hooked by another library); restore it first")
    weights = getattr(block, family.experts)
    shapes = {}
    for part in ("gate_up_proj", "down_proj"):
        parameter = getattr(weights, part, None)
        if not isinstance(parameter, torch.Tensor) or parameter.ndim != 3:
            raise UnsupportedModel(f"{name}.{family.experts}.{part} is {type(parameter).__name__}, wanted a 3-d tensor")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModel(
                f"{name}.{family.experts}.{part} is {parameter.dtype}: quantised experts are not supported; "
                "wanted float32, bfloat16 or float16"
            )
        if parameter.device.type != "cpu":
            raise UnsupportedModel(f"{name}.{family.experts}.{part} is on {parameter.device}; load the experts on the CPU")
        shapes[part] = tuple(parameter.shape)
    (e, two_i, h), down = shapes["gate_up_proj"], shapes["down_proj"]
    if two_i % 2 or down != (e, h, two_i // 2):
        raise UnsupportedModel(f"{name}: gate_up_proj {shapes['gate_up_proj']} and down_proj {down} do not fit [E, 2I, H], [E, H, I]")
    if weights.gate_up_proj.dtype != weights.down_proj.dtype:
        raise UnsupportedModel(f"{name}: gate_up_proj is {weights.gate_up_proj.dtype}, down_proj {weights.down_proj.dtype}")
    return e, h, two_i // 2, weights.gate_up_proj.dtype
