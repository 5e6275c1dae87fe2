"""The joined FFN of a layer, all experts resident: our kernels, and a loop of torch products over the chosen experts."""

import torch

from apexk.kernels.triton.moe_ffn import Workspace, moe_ffn
from apexk.kernels.triton.reference import moe_ffn_ref
from apexk.kernels.triton.shapes import MODELS

from .inputs import ffn_work, layer_inputs
from .registry import Call, Case, relative_error

MODELS_TIMED = ("qwen3.5-35b-a3b", "qwen3-next-80b", "glm-4.5-air")
TOKENS = (1, 4, 8, 16, 32, 512, 4096)


def cases():
    for model in MODELS_TIMED:
        for tokens in TOKENS:
            for provider in ("triton", "torch-loop"):
                yield _case(model, tokens, provider, "cuda", torch.bfloat16)
    for tokens in (1, 16):  # small enough for any machine
        yield _case("tiny", tokens, "torch-loop", "cpu", torch.float32)


def _case(model, tokens, provider, device, dtype):
    build = _triton if provider == "triton" else _torch_loop
    shape = {"model": model, "tokens": tokens}
    return Case("moe_ffn", provider, device, dtype, shape, lambda d: build(MODELS[model], tokens, dtype, d), product=True)


def _call(run, inputs, shape, out, dtype):
    def error():
        want = torch.zeros_like(out)
        compute = torch.float64 if out.device.type == "cpu" else torch.float32
        moe_ffn_ref(inputs.x, inputs.w13, inputs.w2, inputs.ids, inputs.weights, inputs.slot_of, want, compute_dtype=compute)
        return relative_error(out, want)

    return Call(run, error, *ffn_work(shape, inputs, dtype))


def _triton(shape, tokens, dtype, device):
    """Routing is in the time: nothing stands between the router and the first tile."""
    inputs = layer_inputs(shape, tokens, dtype, device)
    out = torch.empty(tokens * shape.topk, shape.hidden, device=device)
    workspace = Workspace(tokens, shape.topk, shape.experts, shape.hidden, shape.inter, dtype, device)

    def run():
        step = workspace.begin(inputs.ids)
        moe_ffn(inputs.x, inputs.w13, inputs.w2, inputs.ids, inputs.weights, inputs.slot_of, out, step=step)

    return _call(run, inputs, shape, out, dtype)


def _torch_loop(shape, tokens, dtype, device):
    """What a model in plain torch does: for each chosen expert, three products. Which experts is known beforehand."""
    inputs = layer_inputs(shape, tokens, dtype, device)
    out = torch.empty(tokens * shape.topk, shape.hidden, device=device)
    flat = inputs.ids.flatten()
    groups = [(e, torch.nonzero(flat == e).flatten()) for e in flat.unique().tolist()]
    scale = inputs.weights.flatten()[:, None]

    def run():
        for expert, pairs in groups:
            both = inputs.x[pairs // shape.topk] @ inputs.w13[expert].T
            h = torch.nn.functional.silu(both[:, : shape.inter]) * both[:, shape.inter :]
            out[pairs] = (h @ inputs.w2[expert].T).float() * scale[pairs]

    return _call(run, inputs, shape, out, dtype)
