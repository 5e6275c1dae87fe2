"""What is put into a model: prompts as tokens, or random tokens of given lengths."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase | None, prompts: list[str], context: int, new_tokens: int) -> dict[str, torch.Tensor]:
    """A left-padded batch. Raises ValueError for an empty prompt or one that the context cannot hold with its answer."""
    if tokenizer is None:
        raise ValueError("this model has no tokenizer (random weights, or a folder without the tokenizer's files): it takes no text, only lengths")
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    lengths = batch["attention_mask"].sum(1).tolist()
    for prompt, length in zip(prompts, lengths, strict=True):
        if not prompt.strip() or length == 0:
            raise ValueError("a prompt is empty; wanted text")
        if length + new_tokens > context:
            raise ValueError(f"a prompt of {length} tokens and {new_tokens} new ones exceed the model's context of {context}")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def synthetic(vocabulary: int, batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens by seed."""
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
