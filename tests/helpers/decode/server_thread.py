"""A server in a thread of the test's process, with a separate event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

START_LIMIT_S: Final = 600.0


@contextmanager
def served_in_thread(
    run: Callable[[Callable[[uvicorn.Server], None]], Coroutine[Any, Any, None]], *, stop_limit_s: float
) -> Iterator[None]:
    """Serve until the block ends.

    `run` must call its argument with the server when the server is ready. Raises the error of `run`.
    """
    servers: list[uvicorn.Server] = []
    failures: list[BaseException] = []
    begun = threading.Event()

    def began(server: uvicorn.Server) -> None:
        servers.append(server)
        begun.set()

    def body() -> None:
        try:
            asyncio.run(run(began))
        except BaseException as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert begun.wait(START_LIMIT_S)
        if failures:
            raise failures[0]
        yield
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(stop_limit_s)
    assert not thread.is_alive()
    assert failures == []
