"""What lossy copies cost the trained model: logits and perplexity on held-out text, against the same model with plain weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from apexk.config import ApexConfig
from apexk.demo import model as demo_model
from apexk.hf.swap import swap

CHUNK = 256  # tokens of a pass


@dataclass
class Loss:
    """One payload's figures over `tokens` next-token predictions. Errors are of logits, against the unpatched model's."""

    payload: str
    lossless: bool
    copy_bytes: int | None  # of one expert; None for the unpatched model
    tokens: int
    perplexity: float
    largest_error: float
    mean_error: float
    changed: float  # share of positions whose most likely token is another


def measure(config: ApexConfig, payloads: Sequence[str], tokens: int, dtype: torch.dtype = torch.float32, say: Callable[[str], None] = lambda text: None,
            pass_tokens: int = CHUNK) -> list[Loss]:
    """The unpatched model, then each payload under `config`, on the first `tokens` tokens of the prompt split, as sequences of
    `CHUNK` that are run `pass_tokens` tokens at a time, over a cache: 1 is what decoding would see.

    Both models see the text itself at each position (teacher forcing). Raises ValueError where the text is shorter.
    """
    configs = [replace(config, payload=name) for name in payloads]
    say("loading the trained model")
    model, tokenizer = demo_model.load(dtype)
    ids = tokenizer("\n".join(demo_model.splits()[1]), return_tensors="pt")["input_ids"][0]
    if not 2 <= tokens <= len(ids):
        raise ValueError(f"{tokens} tokens of held-out text asked for; wanted 2 to {len(ids)}")
    chunks = [chunk for chunk in ids[:tokens].split(CHUNK) if len(chunk) > 1]
    popularity = demo_model.calibrate(model, tokenizer)
    say("running the unpatched model")
    plain = _logits(model, chunks, pass_tokens)
    rows = [_loss("unpatched", True, None, chunks, plain, plain)]
    for one in configs:
        say(f"running with copies: {one.payload}")
        with swap(model, replace(one, popularity=popularity)) as handle:
            info = handle.info()
            rows.append(_loss(one.payload, info["lossless"], info["copy_bytes"], chunks, _logits(model, chunks, pass_tokens), plain))
    return rows


@torch.no_grad()
def _logits(model, chunks: Sequence[torch.Tensor], pass_tokens: int) -> list[torch.Tensor]:
    found = []
    for chunk in chunks:
        pieces, cache = [], {}
        for piece in chunk.split(pass_tokens):
            out = model(input_ids=piece[None], use_cache=pass_tokens < len(chunk), **cache)
            name = "cache" if hasattr(out, "cache") else "past_key_values"  # its new name and its old one
            cache = {name: out.get(name)}
            pieces.append(out.logits[0])
        found.append(torch.cat(pieces)[:-1].double())
    return found


def _loss(payload: str, lossless: bool, copy_bytes: int | None, chunks: Sequence[torch.Tensor], logits: Sequence[torch.Tensor],
          plain: Sequence[torch.Tensor]) -> Loss:
    got, want, targets = torch.cat(list(logits)), torch.cat(list(plain)), torch.cat([chunk[1:] for chunk in chunks])
    error = (got - want).abs()
    perplexity = torch.nn.functional.cross_entropy(got, targets).exp()
    changed = (got.argmax(-1) != want.argmax(-1)).double().mean()
    return Loss(payload, lossless, copy_bytes, len(targets), float(perplexity), float(error.max()), float(error.mean()), float(changed))
