"""`transformers serve` with a swapped model: its server, its OpenAI-compatible API, its batching; only loading is ours."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving import model_manager

from apexk.bench.requests import LEFT, carrying, unwanted, watched
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


def admit(length: int, generation_config, context: int) -> None:
    """Bounds an answer by the model's context. A prompt of `length` tokens that fills it, or one that asks for no token, is refused by status 400."""
    from fastapi import HTTPException

    wanted = generation_config.max_new_tokens
    if not 0 < length < context:
        raise HTTPException(400, f"a prompt of {length} tokens; wanted 1 to {context - 1}, for a context of {context}")
    if wanted is not None and wanted < 1:
        raise HTTPException(400, f"max_tokens is {wanted}; wanted at least 1")
    generation_config.max_new_tokens = min(context - length, wanted or context)


@contextmanager
def bounded(session: Session, ending: Callable[[], bool]) -> Iterator[None]:
    """Meanwhile a request's answer ends where the model's context does, or at the next token once its client has left or the server is `ending`. The
    library's server runs one request after the other and finishes what it was asked for: a request for endless tokens would be its last."""
    from fastapi import HTTPException

    model, real, running = session.source.model, session.source.model.generate, threading.Lock()

    def over(*_) -> bool:
        return unwanted() or ending()

    def generate(*, input_ids, generation_config, **more):
        admit(input_ids.shape[-1], generation_config, session.source.context)
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


def batching(manager: type, context: int) -> type:
    """The library's manager of continuous batching, whose answers end where the model's context does, and once their client has left."""
    from fastapi import HTTPException

    class Batching(manager):
        def generate_streaming(self, model, processor, inputs, gen_config, request_id, **more):
            admit(len(inputs["input_ids"]), gen_config, context)
            queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, **more)
            LEFT.get().then += [streamer.cancel, streamer.end]
            return queue, streamer

        async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
            admit(len(inputs["input_ids"]), gen_config, context)
            work = asyncio.ensure_future(super().generate_non_streaming(model, processor, inputs, gen_config, request_id))
            left = LEFT.get()
            left.then += [lambda: self._cb.cancel_request(request_id), work.cancel]
            try:
                return await work
            except asyncio.CancelledError:
                if left.is_set():
                    raise HTTPException(503, "the client has left, or the server ends") from None
                raise

    return Batching


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """`value` is what `module` has under `name`, for the time of the `with`."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def served(session: Session, *, host: str, port: int, continuous_batching: bool = False) -> Iterator[threading.Thread]:
    """The server in a thread of its own, for the time of the `with`; then answers end at their next token. Raises ImportError without the server's
    packages, ValueError for a model without a tokenizer, and OSError where it cannot listen. Chat requests need a chat template.
    `continuous_batching`: with a cache of the configuration's `context_tokens`, all requests together; the library's would take most of the memory."""
    from transformers import ContinuousBatchingConfig
    from transformers.cli.serve import Serve
    from transformers.cli.serving import server as apps
    from transformers.cli.serving import utils

    if session.source.tokenizer is None:
        raise ValueError(f"{session.source.name} has no tokenizer: it cannot be served")
    ending, waiting, app_of, thread_of = threading.Event(), set(), apps.build_server, utils.InferenceThread
    with ExitStack() as stack:
        stack.enter_context(bounded(session, ending.is_set))
        # these two are made at a model's first request
        stack.enter_context(replaced(utils, "InferenceThread", carrying(thread_of)))
        stack.enter_context(replaced(utils, "CBGenerateManager", batching(utils.CBGenerateManager, session.source.context)))
        with replaced(model_manager, "ModelManager", manager(session)), replaced(apps, "build_server", lambda *args, **more: watched(app_of(*args, **more), waiting)):
            server = Serve(force_model=session.source.name, device=str(session.source.model.device), continuous_batching=continuous_batching,
                           cb_num_blocks=-(-session.handle.config.context_tokens // ContinuousBatchingConfig.page_size), host=host, port=port, non_blocking=True)  # fmt: skip
        server.server.config.timeout_graceful_shutdown = GRACE_S
        try:
            while not server.server.started and server._thread.is_alive():
                time.sleep(0.01)
            if not server.server.started:
                raise OSError(f"no server on {host}, port {port}: the line above says why")
            yield server._thread
        finally:
            ending.set()
            server.server.should_exit = True
            for left in list(waiting):
                left.tell_soon()
            until = time.monotonic() + GRACE_S
            while waiting and time.monotonic() < until:  # the library's batching must not be stopped under them
                time.sleep(0.01)
            server.kill_server()
            server._thread.join()
