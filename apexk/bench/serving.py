"""`transformers serve` with a swapped model: its server, its OpenAI-compatible API, its batching; only loading is ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.cli.serving import model_manager

from apexk.bench.session import Session


def manager(session: Session) -> type[model_manager.ModelManager]:
    """The library's model manager, for which every model name is the one swapped model."""

    class SwappedModels(model_manager.ModelManager):
        def _load_processor(self, *_, **__):
            return session.source.tokenizer

        def _load_model(self, *_, **__):
            return session.source.model

        def list_models(self, *_, **__) -> list[dict]:
            return [{"id": session.source.name, "object": "model", "created": 0, "owned_by": "apexk"}]

    return SwappedModels


@contextmanager
def served(session: Session, *, host: str, port: int, continuous_batching: bool = False, background: bool = False) -> Iterator:
    """Runs the server until it is stopped; in the background for the time of the `with`. Raises ImportError without the
    server's packages, and ValueError for a model without a tokenizer. Chat requests need a chat template."""
    from transformers.cli.serve import Serve

    if session.source.tokenizer is None:
        raise ValueError(f"{session.source.name} has no tokenizer: it cannot be served")
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
