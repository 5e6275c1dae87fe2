"""What the `forward` of a model's plain linear layers is replaced by where the CPU computes everything: the CPU kernels."""

from __future__ import annotations

import types

import torch
from torch import nn

from apexk.hf.forward import is_replaced
from apexk.hf.inspect import Experts
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.linear import compute, unfit

DTYPES = (torch.bfloat16, torch.float16)  # torch's float32 products are as fast as ours


class DenseForward:
    """`forward` of one `nn.Linear`: sums in float32, rounded once. Weight and bias are the module's at the time of the call.

    The layer's own `forward` runs where a gradient may be wanted, under autocast, and where x, weight or bias do not fit the
    kernel (`unfit`). A deep copy or a pickle of the layer has its own `forward` again.
    """

    def __init__(self, module: nn.Linear, ffn: HostFFN, handle):
        self.handle = handle
        self._module, self._ffn = module, ffn

    @torch.compiler.disable
    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear has for it
        module, handle = self._module, self.handle
        weight, bias = module.weight, module.bias
        if served(input, weight, bias):
            x = input if input.dim() == 2 else input.flatten(0, -2)
            if unfit(x, weight, bias) is None:
                with handle.engine.lock:
                    if not handle.restored:  # by another thread, since this pass came to the layer
                        y = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype)
                        compute(self._ffn, x, weight, bias, y, with_torch=True)
                        return y
        return type(module).forward(module, input)

    def __deepcopy__(self, memo):
        copied = memo[id(self._module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._module, "forward")


def served(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this is a plain call without gradients; the kernel's own conditions come on top."""
    if type(x) is not torch.Tensor or x.dim() < 2 or weight.dtype not in DTYPES or torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias is not None and bias.requires_grad))


def layers(model: nn.Module, experts: Experts) -> list[nn.Linear]:
    """The linear layers of 16-bit weights outside of the experts, but for those whose `forward` somebody else has replaced."""
    inside = {module for layer in range(len(experts.blocks)) for module in experts.weights(layer).modules()}
    found = [module for module in model.modules() if type(module) is nn.Linear and module not in inside and not is_replaced(module)]
    return [module for module in found if module.weight.dtype in DTYPES and module.weight.is_cpu and module.weight.is_contiguous()]


def install(found: list[nn.Linear], ffn: HostFFN, handle) -> None:
    """Puts a `DenseForward` in place on each instance."""
    for module in found:
        module.forward = DenseForward(module, ffn, handle)


def uninstall(found: list[nn.Linear], handle) -> None:
    """Each layer's own `forward` again, where it still is this handle's."""
    for module in found:
        if isinstance(forward := vars(module).get("forward"), DenseForward) and forward.handle is handle:
            del module.forward
