"""A swapped model for the command line: opened by name, and generating."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import TextIteratorStreamer

from apexk.bench.source import DTYPES, Source, open_model
from apexk.bench.workload import encode
from apexk.config import ApexConfig
from apexk.hf.handle import Handle
from apexk.hf.loader.load import load
from apexk.hf.swap import swap


@dataclass
class Session:
    """A swapped model and its tokenizer."""

    source: Source
    handle: Handle

    def texts(self, prompts: list[str], chat: bool) -> list[str]:
        """Prompts as the model wants them: through its chat template if asked for."""
        if not chat:
            return prompts
        return [self.conversation([{"role": "user", "content": prompt}]) for prompt in prompts]

    def conversation(self, messages: list[dict]) -> str:
        """Raises ValueError where the model has no chat template."""
        tokenizer = self.source.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError(f"{self.source.name} has no chat template: leave --chat out")
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @torch.inference_mode()
    def generate(self, texts: list[str], new_tokens: int, **how) -> list[str]:
        """The answers to a batch."""
        batch = self._batch(texts, new_tokens)
        out = self.source.model.generate(**batch, max_new_tokens=new_tokens, **how)
        return self.source.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    def stream(self, text: str, new_tokens: int, **how) -> Iterator[str]:
        """The answer to one prompt, piece by piece. What goes wrong in it is raised here."""
        batch = self._batch([text], new_tokens)
        streamer = TextIteratorStreamer(self.source.tokenizer, skip_prompt=True, skip_special_tokens=True)
        failed: list[BaseException] = []
        stopped = threading.Event()

        def work() -> None:
            try:
                with torch.inference_mode():
                    self.source.model.generate(**batch, max_new_tokens=new_tokens, streamer=streamer, stopping_criteria=[lambda *_: stopped.is_set()], **how)
            except BaseException as error:  # raised by the reader below
                failed.append(error)
                streamer.on_finalized_text("", stream_end=True)

        worker = threading.Thread(target=work, name="apexk-generate")
        worker.start()
        try:
            yield from streamer
        finally:
            stopped.set()  # a reader who leaves early ends the run at its next token
            worker.join()
        if failed:
            raise failed[0]

    def _batch(self, texts: list[str], new_tokens: int) -> dict[str, torch.Tensor]:
        if new_tokens < 1:
            raise ValueError(f"new tokens are {new_tokens}; wanted at least 1")
        batch = encode(self.source.tokenizer, texts, self.source.context, new_tokens)
        device = self.source.model.get_input_embeddings().weight.device
        return {name: tensor.to(device) for name, tensor in batch.items()}


def open_session(name: str, config: ApexConfig, *, dtype: str | None = None, layers: int | None = None, trust_remote_code: bool = False) -> Session:
    """The model that `name` stands for (see `open_model`), swapped. A folder's experts are read straight into apexk's store."""
    folder = name != "demo" and not name.startswith("random:")
    source = open_model(name, dtype=dtype, layers=layers, plain=not folder, trust_remote_code=trust_remote_code)
    if not folder:
        return Session(source, swap(source.model, config))
    source.model, handle = load(name, config, dtype=DTYPES.get(dtype), trust_remote_code=trust_remote_code)
    return Session(source, handle)
