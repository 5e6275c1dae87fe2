"""The model families apexk knows, as data: where a sparse block keeps its parts and what its experts compute.

Read from the modeling files of transformers 5.24; a row says only what differs from the usual block:

    logits, weights, ids = block.gate(x)          # [T, E], [T, topk], [T, topk]
    y = block.experts(x, ids, weights)            # gate_up_proj [E, 2I, H] (gate rows, then up rows), down_proj [E, H, I]

To add a family, make a `Family` and put it into `FAMILIES` under its model type before calling `swap`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights, ids


def usual_routing(output: Routed, topk: int) -> Routed:
    return output


def llama4_routing(output: tuple[torch.Tensor, torch.Tensor], topk: int) -> Routed:
    """Llama 4's router gives (scores [T, E], logits [T, E]), the scores of unchosen experts being zero."""
    scores, logits = output
    ids = logits.topk(topk, dim=-1).indices
    return logits, scores.gather(-1, ids), ids


@dataclass(frozen=True)
class Family:
    """One row of the table.

    block: class name of the sparse block. router, experts: its attributes. router_arguments: what the router is called
    with besides x. routing: its output -> (logits, weights, ids). shared: attribute of the shared expert, which may be
    None in a block; shared_gate: of the linear layer whose sigmoid scales it. columns: expert matrices are stored
    transposed, gate_up_proj [E, H, 2I], down_proj [E, I, H]. weight_on_input: the routing weight multiplies x.
    returns_logits: the block returns (rows [T, H], router logits), not hidden states alone.
    """

    block: str
    router: str = "gate"
    experts: str = "experts"
    router_arguments: Callable[[nn.Module], tuple] = lambda block: ()
    routing: Callable[[tuple, int], Routed] = usual_routing
    shared: str | None = None
    shared_gate: str | None = None
    columns: bool = False
    weight_on_input: bool = False
    returns_logits: bool = False

    def route(self, block: nn.Module, x: torch.Tensor, topk: int, *, record: bool) -> Routed:
        """The block's own routing function. `record`: call the module, so that hooks (which collect router logits) see it."""
        router = getattr(block, self.router)
        output = (router if record else router.forward)(x, *self.router_arguments(block))
        return self.routing(output, topk)

    def shared_output(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's rows [T, H], or None where the block has none."""
        expert = getattr(block, self.shared) if self.shared else None
        if expert is None:
            return None
        rows = expert(x)
        return torch.sigmoid(getattr(block, self.shared_gate)(x)) * rows if self.shared_gate else rows


def _lfm2_bias(block: nn.Module) -> tuple:
    return (block.expert_bias if block.use_expert_bias else None,)


_GATED_SHARED = {"shared": "shared_expert", "shared_gate": "shared_expert_gate"}

#: model type -> row
FAMILIES = {
    "deepseek_v2": Family("DeepseekV2Moe", shared="shared_experts"),
    "deepseek_v3": Family("DeepseekV3MoE", shared="shared_experts"),
    "dots1": Family("Dots1MoE", shared="shared_experts"),
    "ernie4_5_moe": Family("Ernie4_5_MoeSparseMoeBlock", shared="shared_experts"),
    "glm4_moe": Family("Glm4MoeMoE", shared="shared_experts"),
    "granitemoe": Family("GraniteMoeMoE", router="router"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1Moe", shared="shared_mlp"),
    "jamba": Family("JambaSparseMoeBlock", router="router"),
    "lfm2_moe": Family("Lfm2MoeSparseMoeBlock", router_arguments=_lfm2_bias),
    "llama4_text": Family("Llama4TextMoe", router="router", routing=llama4_routing, shared="shared_expert", columns=True,
                          weight_on_input=True, returns_logits=True),
    "minimax": Family("MiniMaxSparseMoeBlock"),
    "minimax_m2": Family("MiniMaxM2SparseMoeBlock", router_arguments=lambda block: (block.e_score_correction_bias,)),
    "mixtral": Family("MixtralSparseMoeBlock"),
    "olmoe": Family("OlmoeSparseMoeBlock"),
    "phimoe": Family("PhimoeSparseMoeBlock", router="router"),
    "qwen2_moe": Family("Qwen2MoeSparseMoeBlock", **_GATED_SHARED),
    "qwen3_5_moe_text": Family("Qwen3_5MoeSparseMoeBlock", **_GATED_SHARED),
    "qwen3_moe": Family("Qwen3MoeSparseMoeBlock"),
    "qwen3_next": Family("Qwen3NextSparseMoeBlock", **_GATED_SHARED),
}  # fmt: skip
