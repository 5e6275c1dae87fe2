"""Whether a served request is still wanted: its client's connection is watched while it is answered, which the library's server does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context


class Left(threading.Event):
    """Set once nobody waits for a request's answer any more; each of `then` is called when it is, on the server's event loop, where it is made."""

    def __init__(self):
        super().__init__()
        self.then: list[Callable[[], object]] = []
        self._loop = asyncio.get_running_loop()

    def tell(self) -> None:
        self.set()
        for do in self.then:
            do()

    def tell_soon(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self.tell)


#: of the request that is answered in this context
LEFT: ContextVar[Left | None] = ContextVar("LEFT", default=None)


def unwanted() -> bool:
    """Whether the client has left whose request is answered in this context."""
    left = LEFT.get()
    return left is not None and left.is_set()


def watched(app: Callable, waiting: set[Left]) -> Callable:
    """An ASGI application whose requests know when their client leaves; `waiting` holds those that are being answered. A server tells it in place of a further part of the request's body, so
    these are read ahead: whoever answers does not ask for them."""

    async def watching(scope, receive, send):
        if scope["type"] == "lifespan":
            return await app(scope, receive, ending_its_threads(send))
        if scope["type"] != "http":
            return await app(scope, receive, send)
        left, parts = Left(), asyncio.Queue()
        LEFT.set(left)
        waiting.add(left)

        async def read() -> None:
            while not left.is_set():
                part = await receive()
                if part["type"] == "http.disconnect":
                    left.tell()
                parts.put_nowait(part)

        reader = asyncio.create_task(read())
        try:
            return await app(scope, parts.get, send)
        finally:
            waiting.discard(left)
            reader.cancel()

    return watching


def ending_its_threads(send: Callable) -> Callable:
    """The loop's pool of threads ends before the server says that it has: nobody else would end it."""

    async def sending(message):
        if message["type"].startswith("lifespan.shutdown"):
            await asyncio.get_running_loop().shutdown_default_executor()
        await send(message)

    return sending


def carrying(thread: type) -> type:
    """The library's thread for `generate`, whose work runs in the context of the request that it is for."""

    class Carrying(thread):
        def submit(self, work, *args, **more):
            return super().submit(copy_context().run, work, *args, **more)

        def async_submit(self, work, *args, **more):
            return super().async_submit(copy_context().run, work, *args, **more)

    return Carrying
