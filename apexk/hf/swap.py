"""`swap`: puts apexk's engine in place of a model's expert layers; `restore`: undoes it without the handle at hand."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields

import torch
from torch import nn

from apexk import hardware
from apexk.config import ApexConfig, policy_options
from apexk.device.cpu import CpuDevice
from apexk.device.halves import Halves
from apexk.device.ranged import RangedDevice
from apexk.device.virtual import VirtualDevice
from apexk.engine.runtime import Engine, EngineSettings
from apexk.hf import dense, gpu
from apexk.hf.adopt import StoreViews
from apexk.hf.forward import BlockForward, ExpertsForward, install, is_replaced, swapped_by
from apexk.hf.handle import Handle
from apexk.hf.inspect import find_experts
from apexk.nvtx import Ranges
from apexk.policy import registry
from apexk.policy.types import CostPrior, ModelShape
from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore
from apexk.store.quantised import Payload
from apexk.timeline.writer import Timeline


def swap(model: nn.Module, config: ApexConfig | None = None) -> Handle:
    """Replaces `model`'s expert layers by apexk's engine, in place; `handle.restore()` undoes it.

    The sparse blocks' `forward` is replaced on the instances; no class changes and no `state_dict` key appears. Expert
    parameters become views of one host store, moved layer by layer. Raises `UnsupportedModel`, RuntimeError (already
    swapped), TypeError, ValueError or OSError (timeline) with the model as it was.
    """
    return take_over(model, config or ApexConfig())


def take_over(model: nn.Module, config: ApexConfig, filled: HostStore | None = None) -> Handle:
    """`swap`; with a `filled` store (the loader's) the model's own expert parameters are only placeholders of the right shapes."""
    if not isinstance(config, ApexConfig):
        raise TypeError(f"config is {type(config).__name__}, wanted ApexConfig")
    if config.gpus not in (None, 1):
        raise ValueError(f"gpus is {config.gpus}: several GPUs are modelled by apexk simulate (--set gpus={config.gpus}), a model runs with one: leave gpus out")
    machine = hardware.load(config.hardware)
    experts = find_experts(model)
    for layer, (name, block) in enumerate(zip(experts.names, experts.blocks, strict=True)):
        for module in (experts.weights(layer), block):
            if is_replaced(module):
                by = "is swapped already: restore it first" if swapped_by(module) else "was replaced by another library: remove its hook first"
                raise RuntimeError(f"{name}.forward {by}")
    settings = config.settings(machine)
    policy = registry.get(config.policy, policy_options(settings))
    shape = ModelShape(len(experts.blocks), experts.experts, experts.topk)
    block = ExpertBlock(experts.hidden, experts.intermediate, experts.dtype, experts.biases)
    payload = None if config.payload == "plain" else Payload(block, config.payload)
    moved = payload.nbytes if payload else block.payload_bytes  # by a copy
    if payload:
        machine = hardware.with_payload(machine, payload.ratio)

    # tensors made in inference mode could not be written to outside of it
    with torch.inference_mode(False), ExitStack() as undo:
        runtime = room = None
        if config.device == "cuda":
            runtime = gpu.open_runtime()
            undo.callback(runtime.close)
            room = gpu.room(model, experts, config, runtime)
        capacity = config.capacity(shape.layers, shape.experts, block.stride_bytes, policy.extra_slots, room)
        slots = capacity.slots
        policy.start(shape, slots, _prior(machine), config.popularity, config.seed)
        timeline = undo.enter_context(Timeline(config.timeline))
        store = filled or HostStore(shape.layers, shape.experts, block)
        if runtime is not None:
            device = gpu.build(config, runtime, timeline, store, slots + policy.extra_slots(slots), experts)
        else:
            halves = Halves(store, slots + policy.extra_slots(slots), activation=experts.activation,
                            weight_on_input=experts.family.weight_on_input, arithmetic=config.arithmetic, threads=config.threads, payload=payload)
            device = CpuDevice(timeline, halves) if config.device == "cpu" else VirtualDevice(machine, timeline, moved, halves)
        undo.callback(device.close)
        ranges = Ranges(shape.layers)
        if ranges.active:
            device = RangedDevice(device, ranges)
        views = StoreViews(experts, store)
        handle = Handle(model, config, settings, machine, experts, views, store, device, timeline, capacity)
        if config.device == "cpu" and config.dense == "kernels" and config.arithmetic != "same":
            handle.dense = dense.layers(model, experts)
        timeline.header(**handle.header())
        undo.callback(handle.restore)
        views.adopt(filled=filled is not None)
        if payload:
            for layer, name in enumerate(experts.names):
                payload.check(store.blocks(layer), name)
        if runtime is not None:
            device.pin()
            handle.placement = gpu.Placement(model, experts, runtime.device)
        rules = EngineSettings(part_tokens=config.part_tokens, **{f.name: settings[f.name].value for f in fields(EngineSettings) if f.name in settings})
        handle.engine = Engine(shape, slots, device, policy, rules, timeline, moved)
        kind = ExpertsForward if experts.family.experts_only else BlockForward
        for layer in range(shape.layers):
            install(kind(handle.engine, experts, views, layer, handle), experts, layer)
        if handle.dense:
            dense.install(handle.dense, device.halves.ffn, handle)
        undo.pop_all()
    return handle


def restore(model: nn.Module) -> bool:
    """Restores a swapped model whose handle is out of reach. Returns whether there was anything to restore."""
    handles = {id(h): h for h in map(swapped_by, model.modules()) if h is not None}
    for handle in handles.values():
        handle.restore()
    return bool(handles)


def _prior(machine: hardware.Hardware) -> CostPrior:
    """Cost models start from what the hardware file says."""
    cpu, link, gpu = machine.cpu, machine.link, machine.gpu
    return CostPrior(cpu.c0, cpu.a, cpu.b, link.s0, link.t1, gpu.g0, gpu.g1, gpu.g2, cpu.fixed_when_empty)
