"""The model families apexk knows, as data: where a sparse block keeps its parts and what its experts compute.

Read from the modeling files of transformers 5.24; a row says only what differs from the usual block:

    logits, weights, ids = block.gate(x)          # [T, E], [T, topk], [T, topk]
    y = block.experts(x, ids, weights)            # gate_up_proj [E, 2I, H] (gate rows, then up rows), down_proj [E, H, I]

A model type without a row whose experts are on the library's experts interface is swapped at its experts alone: its
blocks run their own `forward`, and a shared expert overlaps with nothing. docs/add_a_family.md says how to add a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from apexk.hf.layouts import FLAT, Layout, layout_of, usual

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights, ids


def usual_routing(output: Routed, block: nn.Module) -> Routed:
    return output


def llama4_routing(output: tuple[torch.Tensor, torch.Tensor], block: nn.Module) -> Routed:
    """Llama 4's router gives (scores [T, E], logits [T, E]), the scores of unchosen experts being zero."""
    scores, logits = output
    ids = logits.topk(block.top_k, dim=-1).indices
    return logits, scores.gather(-1, ids), ids


def dbrx_routing(logits: torch.Tensor, block: nn.Module) -> Routed:
    """DBRX's router gives logits alone; the block makes weights and ids of them."""
    return logits, *block.route_tokens_to_experts(logits)


@dataclass(frozen=True)
class Family:
    """One row of the table.

    block: class name of the sparse block. router, experts: its attributes; no router: nothing can be predicted with.
    router_arguments: what the router is called with besides x. routing: (its output, block) -> (logits, weights, ids).
    shared: attribute of the shared expert, which may be None in a block; shared_gate: of the linear layer whose sigmoid
    scales it. layout: of the expert weights; None: what the experts module says of itself. weight_on_input: the routing
    weight multiplies x. returns: the block returns (hidden states, "weights") or (rows [T, H], "logits"); None: hidden
    states alone. experts_only: the block's own forward runs, and only its experts are replaced.
    """

    block: str
    router: str | None = "gate"
    experts: str = "experts"
    router_arguments: Callable[[nn.Module], tuple] = lambda block: ()
    routing: Callable[[tuple, nn.Module], Routed] = usual_routing
    shared: str | None = None
    shared_gate: str | None = None
    layout: Layout | None = None
    weight_on_input: bool = False
    returns: str | None = None
    experts_only: bool = False

    def layout_for(self, weights: nn.Module) -> Layout | None:
        """How this experts module keeps its weights; None where nobody says so."""
        return self.layout or layout_of(weights)

    def route(self, block: nn.Module, x: torch.Tensor, *, record: bool) -> Routed:
        """The block's own routing function. `record`: call the module, so that hooks (which collect router logits) see it."""
        router = getattr(block, self.router)
        output = (router if record else router.forward)(x, *self.router_arguments(block))
        return self.routing(output, block)

    def shared_output(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's rows [T, H], or None where the block has none."""
        expert = getattr(block, self.shared) if self.shared else None
        if expert is None:
            return None
        rows = expert(x)
        return torch.sigmoid(getattr(block, self.shared_gate)(x)) * rows if self.shared_gate else rows


def _lfm2_bias(block: nn.Module) -> tuple:
    return (block.expert_bias if block.use_expert_bias else None,)


def _correction_bias(block: nn.Module) -> tuple:
    return (block.e_score_correction_bias,)


_SHARED = {"shared": "shared_experts"}
_GATED_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}

#: model type -> row
FAMILIES = {
    "aria_text": Family("AriaTextMoELayer", router="router", **_SHARED),
    "axk2": Family("AXK2MoE", **_SHARED),
    "bailing_hybrid": Family("BailingHybridMoE", **_SHARED),
    "dbrx": Family("DbrxFFN", router="router", routing=dbrx_routing, layout=FLAT),
    "deepseek_ocr2_text": Family("DeepseekOcr2TextMoe", **_SHARED),
    "deepseek_v2": Family("DeepseekV2Moe", **_SHARED),
    "deepseek_v3": Family("DeepseekV3MoE", **_SHARED),
    "deepseek_v32": Family("DeepseekV32MoE", **_SHARED),
    # their routers see another normalisation of the hidden states than their experts do
    "diffusion_gemma_text": Family("DiffusionGemmaEncoderTextLayer", router=None, experts_only=True),
    "dots1": Family("Dots1MoE", **_SHARED),
    "dots3_note_text": Family("Dots3NoteTextMoE", **_SHARED),
    "ernie4_5_moe": Family("Ernie4_5_MoeSparseMoeBlock", **_SHARED),
    "exaone_moe": Family("ExaoneMoeSparseMoEBlock", **_SHARED),
    "flex_olmo": Family("FlexOlmoSparseMoeBlock"),
    "flint": Family("FlintSparseMoeBlock", shared="shared_expert"),
    "gemma4_text": Family("Gemma4TextDecoderLayer", router=None, experts_only=True),
    "glm4_moe": Family("Glm4MoeMoE", **_SHARED),
    "glm4_moe_lite": Family("Glm4MoeLiteMoE", **_SHARED),
    "glm4v_moe_text": Family("Glm4vMoeTextMoE", **_SHARED),
    "glm5_next_text": Family("Glm5NextTextMoE", **_SHARED),
    "glm_moe_dsa": Family("GlmMoeDsaMoE", **_SHARED),
    "gpt_oss": Family("GptOssMLP", router="router", returns="weights"),
    "granitemoe": Family("GraniteMoeMoE", router="router"),
    "granitemoe_swa": Family("GraniteMoeSWAMoE", router="router"),
    "granitemoehybrid": Family("GraniteMoeHybridMoE", router="router"),
    "granitemoeshared": Family("GraniteMoeSharedMoE", router="router"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1Moe", shared="shared_mlp"),
    "hy_v4": Family("HYV4MoE", **_SHARED),
    "hy_v4_vl_text": Family("HYV4VLMoE", **_SHARED),
    "inkling2_loop_text": Family("Inkling2LoopSparseMoeBlock"),
    "inkling2_text": Family("Inkling2SparseMoeBlock"),
    "jamba": Family("JambaSparseMoeBlock", router="router"),
    "kimi_linear": Family("KimiLinearMoE", **_SHARED),
    "kolibri1": Family("Kolibri1SparseMoeBlock", **_SHARED),
    "lara_mini": Family("LaraMiniSparseMoeBlock", shared="shared_expert"),
    "lfm2_moe": Family("Lfm2MoeSparseMoeBlock", router_arguments=_lfm2_bias),
    "llama4_text": Family("Llama4TextMoe", router="router", routing=llama4_routing, shared="shared_expert",
                          layout=usual(transposed=True), weight_on_input=True, returns="logits"),
    "mellum": Family("MellumSparseMoeBlock"),
    "mimo_v2_flash": Family("MiMoV2FlashMoE"),
    "minimax": Family("MiniMaxSparseMoeBlock"),
    "minimax_m2": Family("MiniMaxM2SparseMoeBlock", router_arguments=_correction_bias),
    "mistral4": Family("Mistral4MoE", **_SHARED),
    "mistral_large4_text": Family("MistralLarge4TextMoE", **_SHARED),
    "mixtral": Family("MixtralSparseMoeBlock"),
    "olmoe": Family("OlmoeSparseMoeBlock"),
    "phimoe": Family("PhimoeSparseMoeBlock", router="router"),
    "qwen2_moe": Family("Qwen2MoeSparseMoeBlock", **_GATED_SHARED),
    "qwen3_5_moe_text": Family("Qwen3_5MoeSparseMoeBlock", **_GATED_SHARED),
    "qwen3_moe": Family("Qwen3MoeSparseMoeBlock"),
    "qwen3_next": Family("Qwen3NextSparseMoeBlock", **_GATED_SHARED),
    "qwen3_omni_moe_talker_text": Family("Qwen3OmniMoeTalkerTextSparseMoeBlock", **_GATED_SHARED),
    "qwen3_omni_moe_text": Family("Qwen3OmniMoeThinkerTextSparseMoeBlock"),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeTextSparseMoeBlock"),
    "qwen4_exp_text": Family("Qwen4ExpTextSparseMoeBlock", **_GATED_SHARED),
    "solar_open": Family("SolarOpenMoE", **_SHARED),
    "unlimited_ocr_text": Family("UnlimitedOcrTextMoe", **_SHARED),
}  # fmt: skip
