"""`swap`: puts apexk's engine in place of a model's expert layers."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from apexk import hardware
from apexk.config import ApexConfig, policy_options
from apexk.device.base import Rows
from apexk.device.cpu import CpuDevice
from apexk.device.halves import Halves
from apexk.device.virtual import VirtualDevice
from apexk.engine import layer as engine_layer
from apexk.engine.runtime import Engine, EngineSettings
from apexk.hf.adopt import adopt, adopted
from apexk.hf.handle import Handle
from apexk.hf.inspect import Experts, find_experts
from apexk.policy import registry
from apexk.policy.types import CostPrior, ModelShape
from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore
from apexk.timeline.writer import Timeline


def swap(model: nn.Module, config: ApexConfig | None = None) -> Handle:
    """Replaces `model`'s expert layers by apexk's engine, in place; `handle.restore()` undoes it.

    The sparse blocks' `forward` is replaced on the instances; no class changes and no `state_dict` key appears. Expert
    parameters become views of one host store, moved layer by layer. Raises `UnsupportedModel`, TypeError or ValueError
    with the model as it was.
    """
    config = config or ApexConfig()
    if not isinstance(config, ApexConfig):
        raise TypeError(f"config is {type(config).__name__}, wanted ApexConfig")
    machine = hardware.load(config.hardware)
    experts = find_experts(model)
    slots = config.slots(experts.experts)
    settings = config.settings(machine)
    policy = registry.get(config.policy, policy_options(settings))
    shape = ModelShape(len(experts.blocks), experts.experts, experts.topk)
    policy.start(shape, slots, _prior(machine), config.popularity, config.seed)

    with ExitStack() as undo:
        timeline = undo.enter_context(Timeline(config.timeline))
        store = HostStore(shape.layers, shape.experts, ExpertBlock(experts.hidden, experts.intermediate, experts.dtype))
        halves = Halves(store, slots + policy.extra_slots(slots), activation=experts.activation, weight_on_input=experts.family.weight_on_input,
                        arithmetic=config.arithmetic, threads=config.threads)
        undo.callback(halves.close)
        if config.device == "cpu":
            device = CpuDevice(timeline, halves)
        else:
            device = VirtualDevice(machine, timeline, store.block.payload_bytes, halves)
        handle = Handle(model, config, settings, machine, experts, store, device, timeline)
        timeline.header(**handle.header())
        undo.callback(handle.restore)
        adopt(experts, store)
        rules = EngineSettings(*(settings[name].value for name in ("resident_first", "in_flight", "prefetch_protects")))
        handle.engine = Engine(shape, slots, device, policy, rules, timeline, store.block.payload_bytes)
        for layer, block in enumerate(experts.blocks):
            block.forward = types.MethodType(_forward(handle.engine, experts, store, layer), block)
        undo.pop_all()
    return handle


def _prior(machine: hardware.Hardware) -> CostPrior:
    """Cost models start from what the hardware file says."""
    cpu, link, gpu = machine.cpu, machine.link, machine.gpu
    return CostPrior(cpu.c0, cpu.a, cpu.b, link.s0, link.t1, gpu.g0, gpu.g1, gpu.g2, cpu.fixed_when_empty)


def _forward(engine: Engine, experts: Experts, store: HostStore, layer: int) -> Callable:
    """The sparse block's new `forward`: the model's own router, the engine, and the shared expert while the engine works."""
    family, name = experts.family, experts.names[layer]
    in_place = adopted(experts, store, layer)
    last = layer + 1 == len(experts.blocks)

    def next_router(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # not recorded: this is no routing of the model's
        _, topk_weights, topk_ids = experts.route(layer + 1, x, record=False)
        return topk_ids, topk_weights

    def forward(block: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and block.training:
            raise RuntimeError("apexk is for inference: call model.eval(), or handle.restore() before training")
        if not in_place():
            raise RuntimeError(
                f"the expert weights of {name} were replaced while swapped (model.to(...)?); "
                "restore first, then change the model, then swap again"
            )
        with torch.no_grad():
            x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
            if x.dtype != experts.dtype:
                raise TypeError(f"{name} got {x.dtype} activations for {experts.dtype} experts (autocast is not supported)")
            logits, topk_weights, topk_ids = experts.route(layer, x, record=True)
            rows = Rows(tokens=x.shape[0], topk=topk_ids.shape[1], x=x, topk_ids=topk_ids, topk_weights=topk_weights.float())
            phase = "prefill" if hidden_states.shape[-2] > 1 else "decode"
            task = engine_layer.submit(engine, layer, rows, phase, None if last else next_router)
            out = torch.empty_like(x)
            engine_layer.join(engine, task, out, family.shared_output(block, x))
        return (out, logits) if family.returns_logits else out.view(hidden_states.shape)

    return forward
