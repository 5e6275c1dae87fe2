"""The model that a command names: a folder with a checkpoint, the small trained one, or random weights in a real shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from apexk.bench.named import DTYPES as NAMES
from apexk.bench.named import check_model

DTYPES = {name: getattr(torch, name) for name in NAMES}


@dataclass
class Source:
    """A model on the CPU, unswapped; its tokenizer, where it has one; what to call it in a result."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    random: bool = False

    @property
    def context(self) -> int:
        """The longest sequence, prompt and answer together."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30


def open_model(name: str = "demo", *, dtype: str | None = None, layers: int | None = None, seed: int = 0, changes: dict | None = None,
               plain: bool = True, trust_remote_code: bool = False) -> Source:
    """`name`: a folder, "demo", or "random:SHAPE" (with `layers` sparse layers, and `changes` to its configuration). `plain=False` leaves a folder's model out:
    the caller loads it with `apexk.load`. Raises ValueError or FileNotFoundError that say what there is.
    """
    check_model(name, dtype=dtype, layers=layers, changed=bool(changes))
    if name == "demo":
        from apexk.demo.model import load

        return Source(*load(DTYPES[dtype or "float32"]), "demo")
    if name.startswith("random:"):
        from apexk.testing.real import random_model

        model = random_model(name.removeprefix("random:"), layers, dtype=DTYPES[dtype or "bfloat16"], seed=seed, **(changes or {}))
        told = [f"{layers} layers"] * bool(layers) + [f"{key} {value}" for key, value in (changes or {}).items()]
        return Source(model, None, ", ".join([name, *told]), random=True)
    folder = Path(name)
    AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)  # refused before the weights are read
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left", trust_remote_code=trust_remote_code)
    if not any((folder / file).is_file() for file in tokenizer.vocab_files_names.values()):
        tokenizer = None  # the library makes one without words where no file is
    elif tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = None
    if plain:
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES.get(dtype, "auto"), local_files_only=True, trust_remote_code=trust_remote_code).eval()
    return Source(model, tokenizer, str(folder))
