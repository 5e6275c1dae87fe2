"""The GPU half of a layer from the router's choice to the summed output, all experts resident: ours, and those of vLLM and
SGLang where they can be imported; they are no dependencies of this project."""

import importlib

import torch

from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import combine_ref, moe_ffn_ref
from apexk.kernels.triton.shapes import MODELS

from .against import PACKAGES, importable
from .inputs import ffn_work, layer_inputs
from .registry import Call, Case, relative_error

TOKENS = (1, 4, 8, 16, 32, 512, 4096)


def cases():
    providers = ["triton", *filter(importable, PACKAGES)]
    for model in ("qwen3.5-35b-a3b", "qwen3-next-80b", "glm-4.5-air"):
        for tokens in TOKENS:
            for provider in providers:
                yield _case(model, tokens, provider)


def _case(model, tokens, provider):
    shape = {"model": model, "tokens": tokens}
    return Case("moe_layer", provider, "cuda", torch.bfloat16, shape, lambda d: _call(MODELS[model], tokens, provider, d), product=True)


def _call(shape, tokens, provider, device):
    inputs = layer_inputs(shape, tokens, torch.bfloat16, device)
    out = torch.empty_like(inputs.x)
    run = {"triton": _ours, "vllm": _vllm, "sglang": _sglang}[provider](shape, inputs, out)

    def error():
        pairs, want = torch.zeros(inputs.ids.numel(), shape.hidden, device=device), torch.empty_like(out)
        arguments = (inputs.x, inputs.w13, inputs.w2, inputs.ids, inputs.weights, inputs.slot_of, pairs)
        moe_ffn_ref(*arguments, compute_dtype=torch.float32)
        combine_ref(pairs, shape.topk, want)
        return relative_error(out, want)

    flops, moved = ffn_work(shape, inputs, torch.bfloat16)
    rows_by_pair = inputs.ids.numel() * shape.hidden * 4  # an inner matter of ours: the task needs one row a token
    return Call(run, error, flops, moved - rows_by_pair + out.numel() * out.element_size())


def _ours(shape, inputs, out):
    tokens, device = inputs.ids.shape[0], out.device
    workspace = Workspace(tokens, shape.topk, shape.experts, shape.hidden, shape.inter, out.dtype, device)
    pairs = torch.empty(inputs.ids.numel(), shape.hidden, device=device)

    def run():
        step = workspace.begin(inputs.ids)
        moe_ffn(inputs.x, inputs.w13, inputs.w2, inputs.ids, inputs.weights, inputs.slot_of, pairs, step=step)
        combine(pairs, shape.topk, out)

    return run


def _vllm(shape, inputs, out):
    fused_experts = importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts
    ids = inputs.ids.int()
    return lambda: out.copy_(fused_experts(inputs.x, inputs.w13, inputs.w2, inputs.weights, ids))


def _sglang(shape, inputs, out):
    moe = "sglang.srt.layers.moe"
    fused_experts = importlib.import_module(f"{moe}.fused_moe_triton.fused_moe").fused_experts
    logits = torch.empty(inputs.ids.shape[0], shape.experts, device=out.device)  # part of the argument, not read
    chosen = importlib.import_module(f"{moe}.topk").StandardTopKOutput(inputs.weights, inputs.ids.int(), logits)
    settings = importlib.import_module(f"{moe}.moe_runner").MoeRunnerConfig(inplace=False)
    return lambda: out.copy_(fused_experts(inputs.x, inputs.w13, inputs.w2, chosen, settings))
