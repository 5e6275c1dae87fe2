"""`transformers serve` with a swapped model: its server, its OpenAI-compatible API, its batching; only loading is ours."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving import model_manager

from apexk.bench.session import Session

logger = logging.getLogger(__name__)


def manager(session: Session) -> type[model_manager.ModelManager]:
    """The library's model manager, for which every model name is the one swapped model."""
    processor = _processor(session)

    class SwappedModels(model_manager.ModelManager):
        def _load_processor(self, *_, **__):
            return processor

        def _load_model(self, *_, **__):
            return session.source.model

        def list_models(self, *_, **__) -> list[dict]:
            return [{"id": session.source.name, "object": "model", "created": 0, "owned_by": "apexk"}]

    return SwappedModels


def _processor(session: Session) -> PreTrainedTokenizerBase:
    """The session's tokenizer. One without a chat template refuses chat requests by status 400, where the library's handler would fail."""
    tokenizer = session.source.tokenizer
    if tokenizer.chat_template is not None:
        return tokenizer
    from fastapi import HTTPException

    why = f"{session.source.name} has no chat template: it answers /v1/completions, and chat requests when it is served with --chat-template"

    def refuse(*_, **__):
        raise HTTPException(400, why)

    logger.warning(why)
    refusing = copy.copy(tokenizer)
    refusing.apply_chat_template = refuse
    return refusing


@contextmanager
def bounded(session: Session) -> Iterator[None]:
    """Meanwhile a request's answer ends where the model's context does, and one whose prompt fills it, or that asks for no token, is refused by
    status 400. The library's server runs one request after the other and finishes what it was asked for although the client has left: a
    request for endless tokens would be its last."""
    from fastapi import HTTPException

    model, context = session.source.model, session.source.context
    real = model.generate

    def generate(*, input_ids, generation_config, **more):
        length, wanted = input_ids.shape[-1], generation_config.max_new_tokens
        if not 0 < length < context:
            raise HTTPException(400, f"a prompt of {length} tokens; wanted 1 to {context - 1}, for a context of {context}")
        if wanted is not None and wanted < 1:
            raise HTTPException(400, f"max_tokens is {wanted}; wanted at least 1")
        generation_config.max_new_tokens = min(context - length, wanted or context)
        return real(input_ids=input_ids, generation_config=generation_config, **more)

    model.generate = generate
    try:
        yield
    finally:
        del model.generate


@contextmanager
def served(session: Session, *, host: str, port: int, continuous_batching: bool = False, background: bool = False) -> Iterator:
    """Runs the server until it is stopped; in the background for the time of the `with`. Raises ImportError without the
    server's packages, and ValueError for a model without a tokenizer. Chat requests need a chat template."""
    from transformers.cli.serve import Serve

    if session.source.tokenizer is None:
        raise ValueError(f"{session.source.name} has no tokenizer: it cannot be served")
    with bounded(session):
        real = model_manager.ModelManager
        model_manager.ModelManager = manager(session)  # `Serve` takes the class from here when it is made
        try:
            server = Serve(force_model=session.source.name, device=str(session.source.model.device), continuous_batching=continuous_batching, host=host,
                           port=port, non_blocking=background)
        finally:
            model_manager.ModelManager = real
        try:
            yield server
        finally:
            if background:
                server.kill_server()
