"""What the `forward` of a model's plain linear layers is replaced by where the CPU computes everything: the CPU kernels."""

from __future__ import annotations

import copy
import types

import torch
from torch import nn
from torch.autograd import forward_ad

from apexk.hf.forward import is_replaced
from apexk.hf.inspect import Experts
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.linear import Prepared

DTYPES = (torch.bfloat16, torch.float16)  # torch's float32 products are as fast as ours
KINDS = (torch.Tensor, nn.Parameter)  # a subclass may mean another product than that of its memory


class DenseForward:
    """`forward` of one `nn.Linear`: sums in float32, rounded once. Weight and bias are the module's at the time of the call.

    The layer's own `forward` runs where a gradient may be wanted, under autocast, in a compiled model, under torch's modes,
    tracing and transforms, and where x, weight or bias do not fit the kernel. A deep copy or a pickle of the layer has its own
    `forward` again.
    """

    def __init__(self, module: nn.Linear, ffn: HostFFN, handle):
        self.handle = handle
        self._module, self._ffn = module, ffn
        self._prepared: Prepared | None = None

    # Few steps, and no decorator: by the time that a layer is called the one before has swept the caches, and all that Python
    # touches comes from memory (a hundred microseconds a call, where it takes fifteen in a loop).
    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # the name that nn.Linear has for it
        module = self._module
        if not torch.compiler.is_compiling() and type(input) is torch.Tensor and input.is_cpu and _is_memory(input):
            parameters = module._parameters
            weight, bias = parameters.get("weight"), parameters.get("bias")
            handle = self.handle
            with handle.engine.lock:
                prepared = self._prepare(weight, bias)
                if prepared is not None and input.dtype is prepared.dtype and not handle.restored and not _differs(input, weight, bias):
                    shape = input.shape
                    if len(shape) > 1 and shape[-1] == prepared.inputs:
                        y = torch.empty((*shape[:-1], prepared.outputs), dtype=prepared.dtype, device="cpu")
                        prepared(input.contiguous(), y)
                        return y
        return type(module).forward(module, input)

    def _prepare(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Prepared | None:
        """For these, which may be others than at the last call; None where they do not fit."""
        if not fits(weight) or bias is not None and not fits(bias):
            self._prepared = None
        elif self._prepared is None or not self._prepared.holds(weight, bias):
            try:
                self._prepared = Prepared(self._ffn, weight, bias, with_torch=True)
            except (TypeError, ValueError):
                self._prepared = None
        return self._prepared

    def __deepcopy__(self, memo):
        copied = copy.deepcopy(self._module, memo)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self):
        return getattr, (self._module, "forward")


def _differs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether torch would do more than to compute the rows."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias is not None and bias.requires_grad):
        return True
    return torch.is_autocast_enabled("cpu") or torch.jit.is_tracing() or _watched()


def _watched() -> bool:
    """Whether a mode of torch (which sees its functions, not the kernel), a transform or forward differentiation is active. torch has no public
    question for that."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return True
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is what lies at its address."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_neg() or tensor._is_zerotensor())


def fits(parameter: torch.Tensor | None) -> bool:
    """Whether the kernel could read it; its size is looked at when it is prepared."""
    return type(parameter) in KINDS and parameter.dtype in DTYPES and parameter.is_cpu and _is_memory(parameter) and parameter.is_contiguous() and parameter.data_ptr() != 0


def layers(model: nn.Module, experts: Experts) -> list[nn.Linear]:
    """The linear layers of 16-bit weights outside of the experts, but for those whose `forward` somebody else has replaced."""
    inside = {module for layer in range(len(experts.blocks)) for module in experts.weights(layer).modules()}
    found = [module for module in model.modules() if type(module) is nn.Linear and module not in inside and not is_replaced(module)]
    return [module for module in found if fits(module.weight)]


def install(found: list[nn.Linear], ffn: HostFFN, handle) -> None:
    """Puts a `DenseForward` in place on each instance."""
    for module in found:
        module.forward = DenseForward(module, ffn, handle)


def uninstall(found: list[nn.Linear], handle) -> None:
    """Each layer's own `forward` again, where it still is this handle's."""
    for module in found:
        if isinstance(forward := vars(module).get("forward"), DenseForward) and forward.handle is handle:
            del module.forward
