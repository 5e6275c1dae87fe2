"""A swapped model for the command line: opened by name, generating, with its settings from the shared flags."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TextIteratorStreamer

from apexk.bench.source import DTYPES, Source, open_model
from apexk.bench.workload import encode
from apexk.config import ApexConfig
from apexk.hf.handle import Handle
from apexk.hf.loader.load import load
from apexk.hf.swap import swap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `run`, `chat` and `serve` share."""
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, demo (default), or random:SHAPE")
    parser.add_argument("--layers", type=int, help="sparse layers of a random model (default: all)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: the model's own)")
    parser.add_argument("--policy", default="apex", help="see apexk policies (default: apex)")
    parser.add_argument("--pool", default="auto", help="expert slots per layer, a size such as 8GiB, or auto (default)")
    parser.add_argument("--device", default="virtual", help="virtual (modelled, default), cpu or cuda")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of a virtual device (default: a6000-paper)")
    parser.add_argument("--threads", type=int, help="of the CPU kernels (default: all that this process may use)")
    parser.add_argument("--timeline", type=Path, metavar="OUT", help="write a timeline.jsonl here")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the folder")


def config_of(args: argparse.Namespace) -> ApexConfig:
    """Raises ValueError for a flag that does not fit."""
    pool = None if args.pool == "auto" else int(args.pool) if args.pool.lstrip("-").isdigit() else args.pool
    return ApexConfig(policy=args.policy, pool=pool, device=args.device, hardware=args.hardware, threads=args.threads, timeline=args.timeline)


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


def open_session(args: argparse.Namespace) -> Session:
    """The model that the shared flags name, swapped. A folder's experts are read straight into apexk's store."""
    config = config_of(args)
    folder = args.model != "demo" and not args.model.startswith("random:")
    source = open_model(args.model, dtype=args.dtype, layers=args.layers, plain=not folder, trust_remote_code=args.trust_remote_code)
    if not folder:
        return Session(source, swap(source.model, config))
    source.model, handle = load(os.fspath(args.model), config, dtype=DTYPES.get(args.dtype), trust_remote_code=args.trust_remote_code)
    return Session(source, handle)
