"""Whether a served request is still wanted: its client's connection is watched while it is answered, which the library's server does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context

#: of the request that is answered in this context: set once its client has left
LEFT: ContextVar[threading.Event | None] = ContextVar("LEFT", default=None)


def unwanted() -> bool:
    """Whether the client has left whose request is answered in this context."""
    left = LEFT.get()
    return left is not None and left.is_set()


def watched(app: Callable) -> Callable:
    """An ASGI application whose requests know when their client leaves. A server tells it in place of a further part of the request's body, so
    these are read ahead: whoever answers does not ask for them."""

    async def watching(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        left, parts = threading.Event(), asyncio.Queue()
        LEFT.set(left)

        async def read() -> None:
            while not left.is_set():
                part = await receive()
                if part["type"] == "http.disconnect":
                    left.set()
                parts.put_nowait(part)

        reader = asyncio.create_task(read())
        try:
            return await app(scope, parts.get, send)
        finally:
            reader.cancel()

    return watching


def carrying(thread: type) -> type:
    """The library's thread for `generate`, whose work runs in the context of the request that it is for."""

    class Carrying(thread):
        def submit(self, work, *args, **more):
            return super().submit(copy_context().run, work, *args, **more)

        def async_submit(self, work, *args, **more):
            return super().async_submit(copy_context().run, work, *args, **more)

    return Carrying
