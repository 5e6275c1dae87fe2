"""What a sparse block's `forward` is replaced by: the model's own router, the engine, the shared expert meanwhile."""

from __future__ import annotations

import types

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


class BlockForward:
    """`block.forward` of one swapped block. A deep copy or a pickle of the block has the library's own `forward` again."""

    def __init__(self, engine: Engine, experts: Experts, views: StoreViews, layer: int, handle):
        self.handle = handle
        self._engine, self._experts, self._views, self._layer = engine, experts, views, layer
        self._block = experts.blocks[layer]
        self._name = experts.names[layer]
        self._last = layer + 1 == len(experts.blocks)

    @torch.compiler.disable  # a compiled model runs the engine as it is
    def __call__(self, hidden_states: torch.Tensor):
        experts, family = self._experts, self._experts.family
        self._check(hidden_states)
        with self._engine.lock, torch.no_grad():
            x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
            logits, topk_weights, topk_ids = experts.route(self._layer, x, record=True)
            rows = Rows(tokens=x.shape[0], topk=topk_ids.shape[1], x=x, topk_ids=topk_ids, topk_weights=topk_weights.float())
            phase = "prefill" if hidden_states.shape[-2] > 1 else "decode"
            task = engine_layer.submit(self._engine, self._layer, rows, phase, None if self._last else self._next_router)
            out = torch.empty_like(x)
            engine_layer.join(self._engine, task, out, family.shared_output(self._block, x))
        if hidden_states.requires_grad and torch.is_grad_enabled():
            out = NoGradient.apply(out, hidden_states)
        return (out, logits) if family.returns_logits else out.view(hidden_states.shape)

    def _next_router(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # not recorded: this is no routing of the model's
        _, topk_weights, topk_ids = self._experts.route(self._layer + 1, x, record=False)
        return topk_ids, topk_weights

    def _check(self, hidden_states: torch.Tensor) -> None:
        if torch.is_grad_enabled() and self._block.training:
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
        if self._views.changed(self._layer):
            self._engine.restart()  # weights were written to (load_state_dict): slots hold the old ones

    def __deepcopy__(self, memo):
        copied = memo[id(self._block)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._block, "forward")


def swapped_by(block: nn.Module):
    """The handle that has this block swapped, or None."""
    forward = vars(block).get("forward")
    return forward.handle if isinstance(forward, BlockForward) else None


def is_replaced(block: nn.Module) -> bool:
    """Whether the instance's `forward` is something else than its class's (as after a deep copy)."""
    forward = vars(block).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(block).forward
