"""`transformers serve` with a swapped model: its server, its OpenAI-compatible API, its batching; only loading is ours."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving import model_manager

from apexk.bench.requests import carrying, unwanted, watched
from apexk.bench.session import Session

logger = logging.getLogger(__name__)
GRACE_S = 1  # for answers to be sent after the last token, once the server is told to end


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
def bounded(session: Session, ending: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile a request's answer ends where the model's context does, or at the next token once its client has left or the server is `ending`;
    one whose prompt fills the context, or that asks for no token, is refused by status 400. The library's server runs one request after the other and
    finishes what it was asked for: a request for endless tokens would be its last."""
    from fastapi import HTTPException

    model, context = session.source.model, session.source.context
    real, running = model.generate, threading.Lock()

    def over(*_) -> bool:
        return unwanted() or ending()

    def generate(*, input_ids, generation_config, **more):
        length, wanted = input_ids.shape[-1], generation_config.max_new_tokens
        if not 0 < length < context:
            raise HTTPException(400, f"a prompt of {length} tokens; wanted 1 to {context - 1}, for a context of {context}")
        if wanted is not None and wanted < 1:
            raise HTTPException(400, f"max_tokens is {wanted}; wanted at least 1")
        generation_config.max_new_tokens = min(context - length, wanted or context)
        with running:
            if over():
                raise HTTPException(503, "the client has left, or the server ends")
            return real(input_ids=input_ids, generation_config=generation_config, stopping_criteria=[over], **more)

    model.generate = generate
    try:
        yield
    finally:
        with running:  # nothing runs any more
            del model.generate


@contextmanager
def served(session: Session, *, host: str, port: int, continuous_batching: bool = False) -> Iterator[threading.Thread]:
    """The server in a thread of its own, for the time of the `with`; then answers end at their next token. Raises ImportError without the server's
    packages, ValueError for a model without a tokenizer, and OSError where it cannot listen. Chat requests need a chat template."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import server as apps
    from transformers.cli.serving import utils

    if session.source.tokenizer is None:
        raise ValueError(f"{session.source.name} has no tokenizer: it cannot be served")
    ending, app_of, thread_of = threading.Event(), apps.build_server, utils.InferenceThread
    with ExitStack() as stack:
        stack.enter_context(bounded(session, ending.is_set))
        stack.enter_context(patch.object(utils, "InferenceThread", carrying(thread_of)))  # made at a model's first request
        with patch.object(model_manager, "ModelManager", manager(session)), patch.object(apps, "build_server", lambda *args, **more: watched(app_of(*args, **more))):
            server = Serve(force_model=session.source.name, device=str(session.source.model.device), continuous_batching=continuous_batching, host=host,
                           port=port, non_blocking=True)  # fmt: skip
        server.server.config.timeout_graceful_shutdown = GRACE_S
        try:
            while not server.server.started and server._thread.is_alive():
                time.sleep(0.01)
            if not server.server.started:
                raise OSError(f"no server on {host}, port {port}: the line above says why")
            yield server._thread
        finally:
            ending.set()
            server.kill_server()
            server._thread.join()
