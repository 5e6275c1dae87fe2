"""Trains the demo's model: a small Qwen3-MoE on public-domain text, so that its routing is real.

    python -m apexk.demo.train TEXT_FILE OUT_DIR [STEPS]

Writes a Hugging Face checkpoint (safetensors, BF16) and its tokenizer to OUT_DIR. About an hour on one slow core.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

BATCH, CONTEXT = 16, 128
PEAK_LR, WARM_UP_STEPS = 3e-3, 100


def train_tokenizer(text_file: str, vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train([text_file], trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<eos>"], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=2048, output_router_logits=True,
        router_aux_loss_coef=0.002, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def draw_batch(ids: torch.Tensor) -> torch.Tensor:
    starts = torch.randint(0, len(ids) - CONTEXT - 1, (BATCH,))
    return torch.stack([ids[s : s + CONTEXT] for s in starts])


def learning_rate(step: int, steps: int) -> float:
    return PEAK_LR * min(1, step / WARM_UP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def validate(model: Qwen3MoeForCausalLM, ids: torch.Tensor, batches: int = 4) -> float:
    """Mean loss in nats per token, without the router's auxiliary loss."""
    model.eval()
    losses = []
    for _ in range(batches):
        x = draw_batch(ids)
        losses.append(model(input_ids=x, labels=x, output_router_logits=False).loss.item())
    model.train()
    return sum(losses) / batches


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: str) -> None:
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.config.output_router_logits = False
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(text_file: str, out: str, steps: int = 3000) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(text_file)
    ids = torch.tensor(tokenizer(Path(text_file).read_text())["input_ids"])
    split = int(len(ids) * 0.95)
    train_ids, valid_ids = ids[:split], ids[split:]
    model = make_model(tokenizer)
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.time()
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        x = draw_batch(train_ids)
        loss = model(input_ids=x, labels=x).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            pace = (time.time() - start) / step
            print(f"step {step} loss {loss.item():.3f} valid {validate(model, valid_ids):.3f} {pace:.3f} s/step", flush=True)
    save(model, tokenizer, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:]))
