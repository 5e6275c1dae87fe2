"""Small models and what to compare of them, for the tests of this folder."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def snapshot(model):
    """Values, identity and strides of every parameter, and every block's own `forward`."""
    return {n: (p.detach().clone(), id(p), p.stride(), p.dtype, p.requires_grad) for n, p in model.named_parameters()}


def assert_as_before(model, before, keys):
    assert list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        value, identity, stride, dtype, grad = before[name]
        assert id(parameter) == identity and parameter.stride() == stride and parameter.dtype == dtype
        assert parameter.requires_grad == grad
        assert torch.equal(parameter, value), name
    assert not [n for n, m in model.named_modules() if "forward" in vars(m)]


def tiny(**changes):
    config = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(config | changes))).eval()
