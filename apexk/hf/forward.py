"""What a sparse block's `forward` is replaced by: the model's own router, the engine, the shared expert meanwhile."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from apexk.device.base import Rows
from apexk.engine import layer as engine_layer
from apexk.engine.runtime import Engine
from apexk.hf.adopt import StoreViews
from apexk.hf.inspect import Experts


class NoGradient(torch.autograd.Function):
    """Passes rows on; a backward pass through them is refused rather than silently wrong."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, _hidden_states: torch.Tensor) -> torch.Tensor:
        return rows

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("apexk is for inference: no gradient goes through its experts; handle.restore() before training")


class LayerForward:
    """What a swapped layer needs: the engine, and what must hold before it runs."""

    def __init__(self, engine: Engine, experts: Experts, views: StoreViews, layer: int, handle):
        self.handle = handle
        self._engine, self._experts, self._views, self._layer = engine, experts, views, layer
        self._block = experts.blocks[layer]
        self._name = experts.names[layer]
        if experts.family.router is None and getattr(engine.policy, "predictor", None) is not None:
            raise ValueError(f"{engine.policy.name}: nothing can be predicted for {experts.model_type}, whose routers do not see its experts' input: leave the predictor out")
        following = range(layer + 1, min(layer + 1 + engine.policy.look_ahead, len(experts.blocks)))
        self._routers = [partial(self._route, later) for later in following] if experts.family.router is not None else []

    def _submit(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, phase: str) -> engine_layer.LayerTask:
        topk_weights = topk_weights.float()
        self._check_routing(self._layer, topk_ids, topk_weights)
        rows = Rows(tokens=x.shape[0], topk=topk_ids.shape[1], x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        return engine_layer.submit(self._engine, self._layer, rows, phase, self._routers)

    def _route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # not recorded: this is no routing of the model's
        _, topk_weights, topk_ids = self._experts.route(layer, x, record=False)
        self._check_routing(layer, topk_ids, topk_weights)
        return topk_ids, topk_weights

    def _check(self, hidden_states: torch.Tensor, grad: bool) -> None:
        if grad and self._block.training:
            raise RuntimeError("apexk is for inference: call model.eval(), or handle.restore() before training")
        if not self._views.in_place(self._layer):
            raise RuntimeError(
                f"the expert weights of {self._name} were replaced while swapped (model.to(...)?); "
                "restore first, then change the model, then swap again"
            )
        if hidden_states.dtype != self._experts.dtype:
            raise TypeError(
                f"{self._name} got {hidden_states.dtype} activations for {self._experts.dtype} experts (autocast is not supported)"
            )
        if hidden_states.ndim < 2 or hidden_states.shape[-1] != self._experts.hidden:
            raise ValueError(f"{self._name} got hidden states {tuple(hidden_states.shape)}, wanted [..., T, {self._experts.hidden}]")
        if self._views.changed(self._layer):
            self._engine.restart()  # weights were written to (load_state_dict): slots hold the old ones

    def _check_routing(self, layer: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        if topk_ids.device.type != "cpu" or topk_ids.numel() == 0:  # a look at the values would make a GPU's host wait
            return
        name, (low, high) = self._experts.names[layer], map(int, topk_ids.aminmax())
        if low < 0 or high >= self._experts.experts:
            raise ValueError(f"the router of {name} chose experts {low}..{high}, wanted 0..{self._experts.experts - 1}")
        if bool(topk_weights.isnan().any()):
            raise ValueError(f"the router of {name} gave NaN weights: its hidden states, or its own weights, are not finite")


class BlockForward(LayerForward):
    """`block.forward` of one swapped block. A deep copy or a pickle of the block has the library's own `forward` again."""

    @torch.compiler.disable  # a compiled model runs the engine as it is
    def __call__(self, hidden_states: torch.Tensor):
        experts, family, grad = self._experts, self._experts.family, torch.is_grad_enabled()
        with self._engine.lock, kept_for_others():
            if self.handle.restored:  # by another thread, since this pass came to the block
                return type(self._block).forward(self._block, hidden_states)
            self._check(hidden_states, grad)
            x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
            logits, topk_weights, topk_ids = experts.route(self._layer, x, record=True)
            task = self._submit(x, topk_ids, topk_weights, phase_of(hidden_states))
            out = torch.empty_like(x)
            engine_layer.join(self._engine, task, out, family.shared_output(self._block, x))
        out = _without_gradient(out, hidden_states)
        if family.returns == "logits":
            return out, logits
        out = out.view(hidden_states.shape)
        return (out, topk_weights) if family.returns == "weights" else out

    def __deepcopy__(self, memo):
        copied = copy.deepcopy(self._block, memo)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._block, "forward")


class ExpertsForward(LayerForward):
    """`experts.forward` of one block that runs its own `forward`: (x [T, H], ids [T, topk], weights [T, topk]) -> [T, H]."""

    def __init__(self, *args):
        super().__init__(*args)
        self._module = self._experts.weights(self._layer)
        self.outer = Outer(self._block)

    @torch.compiler.disable
    def __call__(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        grad = torch.is_grad_enabled()
        with self._engine.lock, kept_for_others():
            if self.handle.restored:
                return type(self._module).forward(self._module, hidden_states, topk_ids, topk_weights)
            self._check(hidden_states, grad)
            x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
            ids, weights = (t.reshape(x.shape[0], -1).contiguous() for t in (topk_ids, topk_weights))
            out = torch.empty_like(x)
            engine_layer.join(self._engine, self._submit(x, ids, weights, self.outer.phase), out, None)
        return _without_gradient(out, hidden_states).view(hidden_states.shape)

    def __deepcopy__(self, memo):
        copied = copy.deepcopy(self._module, memo)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._module, "forward")


class Outer:
    """`block.forward` of a block whose experts are replaced: the library's own, after a look at the shape. The experts see
    rows alone, which do not tell a long prompt from a large batch."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._local = threading.local()

    @property
    def phase(self) -> str:
        return getattr(self._local, "phase", "decode")

    def __call__(self, *args, **kwargs):
        self._local.phase = phase_of(args[0] if args else kwargs["hidden_states"])
        return type(self._block).forward(self._block, *args, **kwargs)

    def __deepcopy__(self, memo):
        copied = copy.deepcopy(self._block, memo)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._block, "forward")


@contextmanager
def kept_for_others() -> Iterator[None]:
    """No gradient, and no inference mode: buffers that grow in a pass could not be written to by a later one outside of that."""
    with torch.inference_mode(False), torch.no_grad():  # in this order: the first allows gradients
        yield


def phase_of(hidden_states: torch.Tensor) -> str:
    """[B, S, H] of more than one position is a prefill."""
    return "prefill" if hidden_states.shape[-2] > 1 else "decode"


def _without_gradient(out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    needed = hidden_states.requires_grad and torch.is_grad_enabled()
    return NoGradient.apply(out, hidden_states) if needed else out


def install(forward: LayerForward, experts: Experts, layer: int) -> None:
    """Puts `forward` in place on its instances."""
    if isinstance(forward, ExpertsForward):
        experts.weights(layer).forward = forward
        experts.blocks[layer].forward = forward.outer
    else:
        experts.blocks[layer].forward = forward


def uninstall(experts: Experts) -> None:
    """The library's own `forward` everywhere again."""
    for layer, block in enumerate(experts.blocks):
        vars(block).pop("forward", None)
        vars(experts.weights(layer)).pop("forward", None)


def swapped_by(block: nn.Module):
    """The handle that has this block swapped, or None."""
    forward = vars(block).get("forward")
    return forward.handle if isinstance(forward, LayerForward) else None


def is_replaced(block: nn.Module) -> bool:
    """Whether the instance's `forward` is something else than its class's (as after a deep copy)."""
    forward = vars(block).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(block).forward
