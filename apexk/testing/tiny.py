"""Tiny random Mixture-of-Experts models, one of each family: `tiny("glm4_moe")`.

Four layers, hidden 64, eight experts of width 32, top-2 unless a family wants otherwise. Weights are random, so routing is
almost uniform; use the demo's trained model where routing has to be real.
"""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

#: for every family; without an end-of-text id, `generate` always makes as many tokens as it is asked for
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
_EXPERTS = {"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {"intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
_LOCAL = {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
_GATED_DELTA_NET = {
    "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_LATENT_ATTENTION = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip

#: model type -> (configuration class, model class, what differs from COMMON)
CONFIGS = {
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {
        **_ROUTED, **_LATENT_ATTENTION, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {
        **_ROUTED, **_LATENT_ATTENTION, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "num_mtp_layers": 0}),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", {**_ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", {
        "intermediate_size": 128, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {
        **_ROUTED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
        "num_mtp_layers": 0, "head_dim": 16, "use_qk_norm": False}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_LOCAL, "head_dim": 16, "sliding_window": 16}),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", _LOCAL),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {
        "intermediate_size": 32, "num_experts": 8, "moe_topk": 2, "head_dim": 16}),
    "jamba": ("JambaConfig", "JambaForCausalLM", {
        "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "use_mamba_kernels": False}),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {
        **_EXPERTS, "num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "llama4_text": ("Llama4TextConfig", "Llama4ForCausalLM", {
        "intermediate_size": 32, "intermediate_size_mlp": 128, "num_local_experts": 8, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "head_dim": 16, "attention_chunk_size": 64}),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {
        **_LOCAL, "head_dim": 16, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**_LOCAL, "head_dim": 16}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_LOCAL, "sliding_window": None}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {
        "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {**_LOCAL, "sliding_window": None}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {
        **_EXPERTS, **_GATED_DELTA_NET, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {
        **_EXPERTS, **_GATED_DELTA_NET, "shared_expert_intermediate_size": 32, "norm_topk_prob": True}),
}  # fmt: skip


def tiny_config(model_type: str, **changes):
    """The configuration alone. Raises ValueError for an unknown type."""
    if model_type not in CONFIGS:
        raise ValueError(f"no tiny model of type {model_type!r}; there are {', '.join(CONFIGS)}")
    name, _, own = CONFIGS[model_type]
    if model_type == "dbrx":  # sub-configurations and field names of its own
        own = {
            "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": None,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
        }  # fmt: skip
        return getattr(transformers, name)(**(own | changes))
    return getattr(transformers, name)(**(COMMON | own | changes))


def tiny(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A random model in eval mode on the CPU; `changes` go to its configuration."""
    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, CONFIGS[model_type][1])._from_config(config, dtype=dtype).eval()
    # some routers and biases start at zero: give all of them a spread, so that routing is not degenerate
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("gate.weight", "router.weight", "wg.weight", "router.layer.weight")):
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.3)
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.05)
            elif name.endswith("proj_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
    return model
