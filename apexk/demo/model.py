"""The demo's model, its prompts (drawn by seed from held-out text) and its calibration counts."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from apexk.hf.popularity import popularity

DATA = Path(__file__).resolve().parent / "data"


def load(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The trained model in eval mode on the CPU, and its tokenizer (left padding)."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # it is loaded in a moment
    try:
        model = AutoModelForCausalLM.from_pretrained(DATA, dtype=dtype, local_files_only=True).eval()
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    return model, AutoTokenizer.from_pretrained(DATA, local_files_only=True)


def splits() -> tuple[list[str], list[str]]:
    """(calibration lines, prompt lines): disjoint halves of the held-out text."""
    lines = (DATA / "heldout.txt").read_text(encoding="utf-8").splitlines()
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


def prompts(count: int = 8, seed: int = 0) -> list[str]:
    """`count` beginnings of verses, 6 to 24 words each, so that a batch of them is ragged."""
    if count < 1:
        raise ValueError(f"{count} prompts asked for; wanted at least 1")
    draw, lines = random.Random(seed), [line for line in splits()[1] if len(line.split()) > 8]
    if count > len(lines):
        raise ValueError(f"{count} prompts asked for; the held-out text has {len(lines)}")
    return [" ".join(line.split()[: draw.randint(6, 24)]) for line in draw.sample(lines, count)]


def calibrate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int = 4096) -> list[list[int]]:
    """Expert counts `[layers][experts]` over the first `tokens` tokens of the calibration split."""
    ids = tokenizer("\n".join(splits()[0]), return_tensors="pt")["input_ids"][0, :tokens]
    return popularity(model, ({"input_ids": ids[None, start : start + 512]} for start in range(0, len(ids), 512)))


@torch.no_grad()
def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], new_tokens: int = 48) -> torch.Tensor:
    """Greedy continuations, int64 `[prompts, <= new_tokens]`; after its end a row holds the padding id."""
    batch = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    out = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    return out[:, batch["input_ids"].shape[1] :].cpu()


def real_tokens(continuations: torch.Tensor, eos: int) -> int:
    """Generated tokens, each row's first end-of-text included and what pads it after that not."""
    ended = (continuations == eos).cumsum(1)
    return int(((ended == 0) | ((ended == 1) & (continuations == eos))).sum())
