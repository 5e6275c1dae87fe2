"""Finds a model's sparse blocks and checks that apexk can run them, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from apexk.hf.families import FAMILIES, Family, Routed
from apexk.kernels.triton.reference import ACTIVATIONS, activation_ref
from apexk.store.block import DTYPES

PARTS = ("gate_up_proj", "down_proj")


class UnsupportedModel(ValueError):
    """This model cannot be swapped; the text says why and what can."""


@dataclass(frozen=True)
class Experts:
    """A model's sparse blocks in layer order, with what they share."""

    model_type: str
    family: Family
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    experts: int
    topk: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    activation: str

    def weights(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.experts)

    def router(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.router)

    def route(self, layer: int, x: torch.Tensor, *, record: bool) -> Routed:
        """(logits, weights [T, topk], ids [T, topk]) of a layer's own routing function for MoE inputs x [T, H]."""
        return self.family.route(self.blocks[layer], x, self.topk, record=record)


def find_experts(model: nn.Module) -> Experts:
    """The sparse blocks of `model`, checked. Raises `UnsupportedModel`; changes nothing."""
    what = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedModel(f"{what} is no Hugging Face model with a config; {_known()}")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type)
    if family is None:
        sparse = any("experts" in name.split(".") for name, _ in model.named_modules())
        why = "is a Mixture-of-Experts family that apexk does not know" if sparse else "is dense: it has no experts"
        raise UnsupportedModel(f"{what} (model type {model_type!r}) {why}; {_known()}")
    if getattr(model.config, "quantization_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(f"{what} is quantised; apexk computes from float32, bfloat16 or float16 weights")
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ == family.block]
    if not found:
        raise UnsupportedModel(f"{what} has no {family.block}: every layer of this {model_type} is dense")
    _check_unshared(family, found)
    shapes = {name: _check_block(family, name, block) for name, block in found}
    if len(set(shapes.values())) > 1:
        raise UnsupportedModel(f"{what}: sparse blocks differ: {shapes}")
    experts, hidden, intermediate, dtype, activation, topk = next(iter(shapes.values()))
    return Experts(model_type, family, tuple(n for n, _ in found), tuple(b for _, b in found), experts, topk, hidden, intermediate,
                   dtype, activation)


def _check_unshared(family: Family, found: list[tuple[str, nn.Module]]) -> None:
    owner: dict[int, str] = {}
    for name, block in found:
        first = owner.setdefault(id(getattr(getattr(block, family.experts), PARTS[0], block)), name)
        if first != name:
            raise UnsupportedModel(f"{name} and {first} share their expert weights; each sparse block must own its experts")


def rows_of(family: Family, weights: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's expert matrices in the block order of the store: `[E, 2I, H]` and `[E, H, I]` (views)."""
    matrices = tuple(getattr(weights, part).detach() for part in PARTS)
    return tuple(m.transpose(1, 2) for m in matrices) if family.columns else matrices


def _known() -> str:
    return f"supported model types: {', '.join(FAMILIES)}"


def _check_block(family: Family, name: str, block: nn.Module) -> tuple:
    """-> (experts, hidden, intermediate, dtype, activation, topk) of one block."""
    weights = getattr(block, family.experts)
    for part in PARTS:
        parameter = getattr(weights, part, None)
        where = f"{name}.{family.experts}.{part}"
        if not isinstance(parameter, torch.Tensor) or parameter.ndim != 3:
            raise UnsupportedModel(f"{where} is {type(parameter).__name__}, wanted a 3-d tensor")
        if parameter.dtype not in DTYPES:
            kinds = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise UnsupportedModel(f"{where} is {parameter.dtype}: other or quantised weights are not supported; wanted {kinds}")
        if parameter.device.type != "cpu":
            raise UnsupportedModel(f"{where} is on {parameter.device}; load the experts on the CPU")
    w13, w2 = rows_of(family, weights)
    (experts, twice, hidden), dtype = w13.shape, w13.dtype
    if twice % 2 or w2.shape != (experts, hidden, twice // 2):
        raise UnsupportedModel(f"{name}: gate_up_proj {tuple(weights.gate_up_proj.shape)} and down_proj {tuple(weights.down_proj.shape)} do not fit")
    if w2.dtype != dtype:
        raise UnsupportedModel(f"{name}: gate_up_proj is {dtype}, down_proj {w2.dtype}")
    if getattr(weights, "has_bias", False) or getattr(weights, "has_post_expert_norm", False):
        raise UnsupportedModel(f"{name}: experts with biases or a norm of their own are not supported")
    topk = getattr(getattr(block, family.router), "top_k", None) or getattr(block, "top_k", None)
    return experts, hidden, twice // 2, dtype, _activation(name, weights), topk


def _activation(name: str, weights: nn.Module) -> str:
    """Which of the kernels' activations the experts apply, found by trying them: families wrap them in various ways."""
    gate = torch.linspace(-9, 9, 64, dtype=torch.float64).reshape(2, 32)
    up = torch.linspace(8, -8, 64, dtype=torch.float64).reshape(2, 32)
    theirs: Callable = getattr(weights, "_apply_gate", None) or (lambda both: weights.act_fn(both[:, :32]) * both[:, 32:])
    with torch.no_grad():
        values = theirs(torch.cat([gate, up], 1))
    for activation in ACTIVATIONS:
        if values.shape == gate.shape and torch.allclose(values, activation_ref(gate, up, activation), rtol=1e-6, atol=1e-9):
            return activation
    what = getattr(weights, "act_fn", None)
    raise UnsupportedModel(f"{name}: experts apply {what if what is not None else 'an unknown activation'}; supported: {', '.join(ACTIVATIONS)}")
