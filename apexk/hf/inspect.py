"""Finds a model's sparse blocks and checks that apexk can run them, before anything is changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from apexk.hf.families import FAMILIES, Family, Routed
from apexk.hf.implementation import NAME, asked_for
from apexk.hf.layouts import Layout
from apexk.kernels.triton.reference import ACTIVATIONS, activation_ref
from apexk.store.block import DTYPES

log = logging.getLogger("apexk")


class UnsupportedModel(ValueError):
    """This model cannot be swapped; the text says why and what can."""


@dataclass(frozen=True)
class Experts:
    """A model's sparse blocks in layer order, with what they share."""

    model_type: str
    family: Family
    layout: Layout
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    experts: int
    topk: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    activation: str

    @property
    def biases(self) -> bool:
        return "gate_up_proj_bias" in self.layout.names

    def weights(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.experts)

    def router(self, layer: int) -> nn.Module:
        return getattr(self.blocks[layer], self.family.router)

    def route(self, layer: int, x: torch.Tensor, *, record: bool) -> Routed:
        """(logits, weights [T, topk], ids [T, topk]) of a layer's own routing function for MoE inputs x [T, H]."""
        return self.family.route(self.blocks[layer], x, record=record)


def find_experts(model: nn.Module) -> Experts:
    """The sparse blocks of `model`, checked. Raises `UnsupportedModel`; changes nothing."""
    what = type(model).__name__
    if isinstance(model, (str, os.PathLike)):
        raise UnsupportedModel(f"got a path, wanted a model: `model, handle = apexk.load({os.fspath(model)!r})` loads a checkpoint's folder and swaps it")
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedModel(f"{what} is no Hugging Face model with a config; {_known()}")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    model_type = getattr(config, "model_type", None)
    if getattr(model.config, "quantization_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(f"{what} is quantised; apexk computes from float32, bfloat16 or float16 weights")
    family = FAMILIES.get(model_type) or generic(model, model_type)
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ == family.block]
    found = [(name, block) for name, block in found if getattr(block, family.experts, None) is not None]
    if not found:
        raise UnsupportedModel(f"{what} has no {family.block}: every layer of this {model_type} is dense")
    if any(asked_for(getattr(block, family.experts)) for _, block in found):
        family = replace(family, experts_only=True)
    elif getattr(config, "_experts_implementation", None) == NAME:
        log.warning("%s: experts_implementation %r did not take, since its experts are not on the library's interface; its blocks are replaced", what, NAME)
    _check_unshared(family, found)
    shapes = {name: _check_block(family, name, block) for name, block in found}
    if len(set(shapes.values())) > 1:
        raise UnsupportedModel(f"{what}: sparse blocks differ: {shapes}")
    experts, hidden, intermediate, dtype, activation = next(iter(shapes.values()))
    topk = _topk(family, found[0][1], config)
    if not 1 <= topk <= experts:
        raise UnsupportedModel(f"{what}: each token chooses {topk} of {experts} experts; wanted 1..{experts}: see num_experts_per_tok in its configuration")
    layout = family.layout_for(getattr(found[0][1], family.experts))
    return Experts(model_type, family, layout, tuple(n for n, _ in found), tuple(b for _, b in found), experts, topk, hidden,
                   intermediate, dtype, activation)


def generic(model: nn.Module, model_type: str | None) -> Family:
    """The row of a model type that has none: its blocks keep their own forward, and the experts inside are replaced."""
    what = f"{type(model).__name__} (model type {model_type!r})"
    sparse = any("experts" in name.split(".") for name, _ in model.named_modules())
    if not sparse:
        raise UnsupportedModel(f"{what} is dense: it has no experts; {_known()}")
    found: dict[tuple[str, str], list[nn.Module]] = {}
    for block in model.modules():
        for name, child in block.named_children():
            if hasattr(child, "is_transposed") and hasattr(child, "has_gate"):
                found.setdefault((type(block).__name__, name), []).append(block)
    if not found:
        raise UnsupportedModel(f"{what} is a Mixture-of-Experts family that apexk does not know, and its experts are not on the "
                               f"library's experts interface; {_known()}")
    if len(found) > 1:
        raise UnsupportedModel(f"{what} has experts of several kinds: {', '.join(block for block, _ in found)}; apexk swaps one")
    (block, experts), blocks = next(iter(found.items()))
    family = Family(block, router=None, experts=experts, experts_only=True)
    return replace(family, router=next((name for name in ("gate", "router") if all(_routes(b, name, experts) for b in blocks)), None))


def _routes(block: nn.Module, name: str, experts: str) -> bool:
    """Whether a router can be called with x alone, as for a prediction; found by calling it."""
    router, down = getattr(block, name, None), getattr(getattr(block, experts), "down_proj", None)
    if not isinstance(router, nn.Module) or down is None or down.ndim != 3:
        return False
    hidden = down.shape[2] if getattr(block, experts).is_transposed else down.shape[1]
    try:
        with torch.no_grad():
            _, weights, ids = router.forward(torch.zeros(1, hidden, dtype=down.dtype))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False  # wants more than x, or something else than the experts' input
    return ids.shape == weights.shape and not ids.is_floating_point() and ids.ndim == 2


def _topk(family: Family, block: nn.Module, config) -> int:
    """Experts a token, from wherever this family says it."""
    places = [getattr(block, family.router)] if family.router else []
    for place in (*places, block, getattr(block, family.experts), config):
        for name in ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"):
            if isinstance(getattr(place, name, None), int):
                return getattr(place, name)
    raise UnsupportedModel(f"{family.block}: neither its router nor the configuration says how many experts a token chooses")


def _check_unshared(family: Family, found: list[tuple[str, nn.Module]]) -> None:
    owner: dict[int, str] = {}
    for name, block in found:
        for parameter in getattr(block, family.experts).parameters():
            if owner.setdefault(id(parameter), name) != name:
                raise UnsupportedModel(f"{name} and {owner[id(parameter)]} share their expert weights; each sparse block must own its experts")


def _known() -> str:
    return f"supported model types: {', '.join(FAMILIES)}, and those whose experts are on the library's experts interface"


def _check_block(family: Family, name: str, block: nn.Module) -> tuple:
    """-> (experts, hidden, intermediate, dtype, activation) of one block."""
    weights = getattr(block, family.experts)
    if not getattr(weights, "has_gate", True):
        raise UnsupportedModel(f"{name}: its experts have no gate; apexk computes act(gate) * up")
    if getattr(weights, "has_post_expert_norm", False):
        raise UnsupportedModel(f"{name}: experts with a norm of their own are not supported")
    layout = family.layout_for(weights)
    if layout is None:
        raise UnsupportedModel(f"{name}.{family.experts} ({type(weights).__name__}) is not on the library's experts interface")
    tensors = []
    for part in layout.names:
        where, parameter = f"{name}.{family.experts}.{part}", weights
        for step in part.split("."):
            parameter = getattr(parameter, step, None)
        if not isinstance(parameter, torch.Tensor):
            raise UnsupportedModel(f"{where} is {type(parameter).__name__}, wanted a tensor")
        if parameter.dtype not in DTYPES:
            kinds = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise UnsupportedModel(f"{where} is {parameter.dtype}: other or quantised weights are not supported; wanted {kinds}")
        if parameter.device.type != "cpu":
            raise UnsupportedModel(f"{where} is on {parameter.device}; load the experts on the CPU")
        tensors.append(parameter.detach())
    if len({t.dtype for t in tensors}) > 1:
        raise UnsupportedModel(f"{name}: expert weights of several dtypes: {', '.join(str(t.dtype) for t in tensors)}")
    shapes = {part: tuple(t.shape) for part, t in zip(layout.names, tensors, strict=True)}
    try:
        matrices = layout.matrices(tensors, _count(weights, tensors[0]))
        experts, intermediate, hidden = matrices[0].shape
        wanted = [(experts, intermediate, hidden)] * 2 + [(experts, hidden, intermediate)]
        wanted += [(experts, intermediate)] * 2 + [(experts, hidden)]
        fits = all(m.shape == w for m, w in zip(matrices, wanted, strict=False))
    except (RuntimeError, ValueError, IndexError):  # cannot even be split
        fits = False
    if not fits:
        raise UnsupportedModel(f"{name}: the shapes of its expert weights do not fit: {shapes}")
    return experts, hidden, intermediate, tensors[0].dtype, _activation(name, weights)


def _count(weights: nn.Module, first: torch.Tensor) -> int:
    return first.shape[0] if first.ndim == 3 else weights.num_experts


def _activation(name: str, weights: nn.Module) -> str:
    """Which of the kernels' activations the experts apply, found by trying them: families wrap them in various ways."""
    gate = torch.linspace(-9, 9, 64, dtype=torch.float64).reshape(2, 32)
    up = torch.linspace(8, -8, 64, dtype=torch.float64).reshape(2, 32)
    act = getattr(weights, "act_fn", None) or getattr(getattr(weights, "mlp", None), "activation_fn", None)
    theirs: Callable | None = getattr(weights, "_apply_gate", None) or (act and (lambda both: act(both[:, :32]) * both[:, 32:]))
    if theirs is not None:
        interleaved = not getattr(weights, "is_concatenated", True)
        with torch.no_grad():
            values = theirs(torch.stack([gate, up], 2).reshape(2, 64) if interleaved else torch.cat([gate, up], 1))
        for activation in ACTIVATIONS:
            if values.shape == gate.shape and torch.allclose(values, activation_ref(gate, up, activation), rtol=1e-6, atol=1e-9):
                return activation
    raise UnsupportedModel(f"{name}: experts apply {str(act).split('(')[0] if act is not None else 'an unknown activation'}; supported: {', '.join(ACTIVATIONS)}")
