"""A model whose experts are in host memory and whose rest is on a GPU: what moves there, what must stay free, the device."""

from __future__ import annotations

import torch
from torch import nn

from apexk.config import ApexConfig
from apexk.device.cuda import CudaDevice
from apexk.device.gpu_kernels import ReferenceKernels, TritonKernels
from apexk.device.runtime import CudaRuntime
from apexk.hf.inspect import Experts
from apexk.hf.kv import kv_bytes
from apexk.store.capacity import Room
from apexk.store.host_store import HostStore
from apexk.timeline.writer import Timeline

OF_TOTAL = 0.05  # kept for torch's allocator, libraries and what the dense layers make


def open_runtime() -> CudaRuntime:
    """torch's current CUDA device. RuntimeError says what is missing."""
    from apexk.device.cuda_runtime import TorchCuda  # cupy

    return TorchCuda()


def room(model: nn.Module, experts: Experts, config: ApexConfig, runtime: CudaRuntime) -> Room:
    """Free memory, and what an automatic pool leaves of it."""
    free, total = runtime.memory_info()
    dense = sum(t.nbytes for t in _dense(model, experts) if t.device != runtime.device)
    return Room(free, {
        "rest of the model": dense,
        f"KV cache ({config.context_tokens} tokens)": kv_bytes(model, experts, 1, config.context_tokens),
        "expert rows": row_bytes(experts, config.part_tokens),
        "activations and libraries": round(OF_TOTAL * total),
    })  # fmt: skip


def row_bytes(experts: Experts, tokens: int) -> int:
    """What the expert rows of a part of an input take, in turn and in waves."""
    return tokens * experts.topk * (3 * experts.hidden * 4 + experts.intermediate * experts.dtype.itemsize)


def build(config: ApexConfig, runtime: CudaRuntime, timeline: Timeline, store: HostStore, slots: int, experts: Experts) -> CudaDevice:
    rule = {"activation": experts.activation, "weight_on_input": experts.family.weight_on_input}
    kernels = TritonKernels if runtime.device.type == "cuda" else ReferenceKernels
    made = kernels(store.block, store.experts, runtime.device, load=getattr(runtime, "kernel", None), **rule)
    return CudaDevice(runtime, timeline, store, slots, made, topk=experts.topk, threads=config.threads, transfer=config.transfer, **rule)


class Placement:
    """Everything of a model but its experts, moved to a device and back to where each tensor was."""

    def __init__(self, model: nn.Module, experts: Experts, device: torch.device):
        self._moved: list[tuple[nn.Parameter, torch.device]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        try:
            with torch.no_grad():
                for parameter in _dense_parameters(model, experts):
                    if parameter.device != device:
                        self._moved.append((parameter, parameter.device))
                        parameter.data = parameter.data.to(device)
                there: dict[int, torch.Tensor] = {}
                for module in model.modules():
                    for name, buffer in module._buffers.items():
                        if buffer is not None and buffer.device != device:
                            self._buffers.append((module, name, buffer))
                            module._buffers[name] = there.setdefault(id(buffer), buffer.to(device))
        except BaseException:
            self.back()
            raise

    def back(self) -> None:
        """Bit for bit, whatever was written to them meanwhile included. May be called again."""
        with torch.no_grad():
            for parameter, device in self._moved:
                parameter.data = parameter.data.to(device)
            for module, name, buffer in self._buffers:
                if module._buffers[name] is not buffer:
                    module._buffers[name] = buffer.copy_(module._buffers[name])
        self._moved, self._buffers = [], []


def _dense_parameters(model: nn.Module, experts: Experts) -> list[nn.Parameter]:
    inside = {id(p) for layer in range(len(experts.blocks)) for p in experts.weights(layer).parameters()}
    return [p for p in model.parameters() if id(p) not in inside]


def _dense(model: nn.Module, experts: Experts) -> list[torch.Tensor]:
    return [*_dense_parameters(model, experts), *model.buffers()]
