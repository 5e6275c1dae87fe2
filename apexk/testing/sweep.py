"""Every experts class of the installed transformers: swapped and equal to the unpatched model, or refused with a reason.

    python -m apexk.testing.sweep > docs/families.md

The classes are found in the library's sources. For each a small random model is made from its configuration class, with
sizes from one table (`SMALL`) and a few exceptions, and its float32 outputs are compared with and without apexk.
"""

from __future__ import annotations

import ast
import importlib
import logging
import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from apexk.config import ApexConfig
from apexk.hf.families import FAMILIES
from apexk.hf.inspect import UnsupportedModel
from apexk.hf.swap import swap

#: field of a configuration -> its value in a small model, for whatever class has such a field
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "d_model": 64, "num_hidden_layers": 4, "num_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "intermediate_size": 32,
    "moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "moe_hidden_size": 48, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 8, "sliding_window": 16, "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_ALL_HEADS = {"num_key_value_heads": 4}
#: module -> what its configuration wants otherwise
OTHERWISE = {
    "axk2": _ALL_HEADS,
    "dbrx": {
        "n_heads": 4, "n_layers": 4, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v32": _ALL_HEADS,
    "diffusion_gemma": {"top_k_experts": 2},
    "dots3_note": _ALL_HEADS,
    "ernie4_5_vl_moe": {"head_dim": 128, "moe_intermediate_size": [32, 16]},  # text and vision experts, as in the released model
    "gemma4": {"top_k_experts": 2, "enable_moe_block": True},
    "glm4_moe_lite": _ALL_HEADS,
    "glm4v_moe": {"head_dim": 128},
    "glm5_next": {"index_topk": 32, "qk_rope_head_dim": 0, **_ALL_HEADS},
    "glm_moe_dsa": _ALL_HEADS,
    "hy_v4_vl": {"qk_rope_head_dim": 64, "index_head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, **_ALL_HEADS},
    "mistral_large4": _ALL_HEADS,
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 32},
    "qwen4_exp": {"layer_types": ["linear_attention"] * 4},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """An experts class of the library."""

    module: str  # folder under transformers/models
    name: str
    on_interface: bool


@dataclass(frozen=True)
class Row:
    """What became of one experts class. replaced: "blocks", "experts", or None where it was refused for `reason`."""

    found: Found
    model_type: str
    block: str
    replaced: str | None
    predicts: bool = False
    views: str = ""
    difference: float = 0.0  # largest, over the largest output
    matters: float = 0.0  # the same without the experts' weights: what a wrong result would look like
    reason: str = ""


@cache
def experts_classes() -> tuple[Found, ...]:
    """All of them, in order of their modules."""
    found = []
    for path in sorted(Path(transformers.__path__[0], "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "Experts(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                on = any("use_experts_implementation" in ast.unparse(d) for d in node.decorator_list)
                if on or re.search(r"(?<!Shared)Experts$", node.name):
                    found.append(Found(path.parent.name, node.name, on))
    return tuple(found)


def small_model(found: Found) -> PreTrainedModel:
    """A small random model that has experts of this class. Raises LookupError with what was tried."""
    base = f"transformers.models.{found.module}"
    modeling = importlib.import_module(f"{base}.modeling_{found.module}")
    tried = []
    for config_class in _classes(importlib.import_module(f"{base}.configuration_{found.module}"), PretrainedConfig):
        known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
        own = OTHERWISE.get(found.module, {})
        values = {k: v for k, v in SMALL.items() if k in known} | own
        models = [c for c in _classes(modeling, PreTrainedModel) if c.config_class is config_class and not c.__name__.endswith("PreTrainedModel")]
        if not any(word in name for name in known for word in ("experts", "moe", "ffn_config")):
            continue  # a part of another kind, and of full size
        for kind in sorted(models, key=lambda c: not c.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))):
            try:
                model = kind._from_config(config_class(**values), dtype=torch.float32).eval()
            except Exception as error:  # a class that wants other fields
                tried.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                continue
            if any(type(m).__name__ == found.name for m in model.modules()):
                return _spread(model)
    raise LookupError(f"no small model with {found.name}: {'; '.join(tried)}")


def outputs(model: PreTrainedModel) -> torch.Tensor:
    """Logits, or the last hidden states, of one fixed input."""
    ids = torch.arange(3, 39).reshape(2, 18)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {"use_cache": False})
    with torch.no_grad():
        try:
            return model(**inputs)[0]
        except AttributeError:  # it has no embeddings: another model feeds it
            hidden = torch.randn(2, 18, SMALL["hidden_size"], generator=torch.Generator().manual_seed(1))
            return model(inputs_embeds=hidden, use_cache=False)[0]


def check(found: Found, config: ApexConfig | None = None) -> Row:
    """Swaps a small model with these experts and compares. Raises LookupError where none can be made."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    model = small_model(found)
    plain = outputs(model)
    scale = plain.abs().max().item()
    text = model.config.get_text_config()
    block = next((type(m).__name__ for m in model.modules() for child in m.children() if type(child).__name__ == found.name), "")
    try:
        handle = swap(model, config or ApexConfig(pool=3))
    except UnsupportedModel as error:
        return Row(found, text.model_type, block, None, reason=_short(str(error)))
    with handle:
        difference = (outputs(model) - plain).abs().max().item() / scale
        info, experts = handle.info(), handle._experts
        layers = len(experts.blocks)
        if handle.summary()["prefill"]["layers"] != layers:
            raise RuntimeError(f"{found.name}: {handle.summary()['prefill']['layers']} of {layers} layers ran on apexk")
    views = ", ".join(n for n in experts.layout.names if n not in experts.layout.views) or "all"
    for layer in range(layers):
        for parameter in experts.layout.parameters(experts.weights(layer)):
            parameter.data.zero_()
    matters = (outputs(model) - plain).abs().max().item() / scale
    return Row(found, text.model_type, block, info["model"]["replaced"], experts.family.router is not None, views, difference, matters)


def _classes(module, base: type) -> list[type]:
    return [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__]


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    """Gives every matrix and every bias of routers and experts values that matter: some classes start at zero, or empty."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and (tensor.ndim > 1 or name.endswith("bias")):
                wide = tensor.shape[-1] if isinstance(tensor, nn.Parameter) and tensor.ndim > 1 else 400
                tensor.copy_(torch.randn(tensor.shape, generator=draw) / wide**0.5)
    return model


def _short(reason: str) -> str:
    short = reason.split("; supported")[0].split("; apexk computes")[0].split(": {")[0]
    return re.sub(r"^.* is a Mixture-of-Experts family that apexk does not know, and its", "its", short)


def table(rows: list[Row]) -> str:
    """docs/families.md."""
    ours = [r for r in rows if r.replaced]
    lines = [
        "# Model families",
        "",
        f"Every experts class of transformers {transformers.__version__}, each in a small random model: float32 outputs with and without apexk, largest "
        "difference over the largest output. Made by `python -m apexk.testing.sweep`; `tests/hf/test_sweep.py` holds each line to 1e-4.",
        "",
        f"**{len(ours)} of {len(rows)} classes are swapped** ({sum(r.replaced == 'blocks' for r in ours)} by their sparse blocks, "
        f"{sum(r.replaced == 'experts' for r in ours)} by their experts alone), {len(rows) - len(ours)} are refused. Of the "
        f"{sum(r.found.on_interface for r in rows)} on the library's experts interface, {sum(r.found.on_interface for r in ours)} are swapped.",
        "",
        "*Blocks*: apexk runs the block, so that a shared expert overlaps with the routed ones. *Experts*: the block's own forward runs and only its experts are",
        "replaced; this needs no row in `apexk/hf/families.py`. *Predicts*: the next layer's router can be asked ahead, which speculative policies need.",
        "*Copies*: parameters that cannot be views of the store while swapped (see `apexk/hf/stored.py`).",
        "",
        "| model type | experts class | replaced | predicts | copies | difference |",
        "|---|---|---|---|---|---|",
    ]
    for r in ours:
        copies = "" if r.views == "all" else r.views
        lines.append(f"| {r.model_type} | {r.found.name} | {r.replaced} | {'yes' if r.predicts else ''} | {copies} | {'< 1e-4' if r.difference < 1e-4 else f'{r.difference:.0e}'} |")
    lines += ["", "Refused, by name and with the reason:", "", "| model type | experts class | reason |", "|---|---|---|"]
    lines += [f"| {r.model_type} | {r.found.name} | {r.reason} |" for r in rows if not r.replaced]
    without = sorted(set(FAMILIES) - {r.model_type for r in rows})
    if without:
        lines += ["", f"Rows of other model types: {', '.join(without)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    logging.getLogger("apexk").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(table([check(found) for found in experts_classes()]), end="")


if __name__ == "__main__":
    main()
