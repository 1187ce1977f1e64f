"""The program of a front: `python -m ...front_process CONTROL LISTENING`.

CONTROL and LISTENING are inherited descriptors. The decoder's process starts the program (`front_server`). On SIGTERM,
it exits when its streams have ended. If the decoder's process ends, it exits at once.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from starlette.applications import Starlette
from starlette.routing import Mount

from gpulease.client.decode.openai.api_keys import distinct_keys
from gpulease.client.decode.openai.fronts.front_messages import (
    FrontProtocolError,
    FrontReady,
    Welcome,
    frame,
    read_to_front,
)
from gpulease.client.decode.openai.fronts.front_source import FrontSource
from gpulease.client.decode.openai.fronts.inner_proxy import InnerProxy
from gpulease.client.decode.openai.openai_server import (
    ERROR_REPLIES,
    OpenAiFace,
    browsers_of,
    completion_routes,
    refuse,
)
from gpulease.client.decode.supervisor.model_texts import read_model_texts
from gpulease.client.http.uvicorn_server import known_hosts, serve_within
from gpulease.imports import end_imports

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_TOKENIZERS: Final = 16
"""Maximum number of tokenizers that a front keeps. Each may take about 12 MB, and a reload can replace the models."""

LOST: Final = 1
"""Exit status of a front after its decoder's process has ended."""


class Tokenizers:
    """The tokenizers of models. Another process reads each at its first use, so that streams here do not stall."""

    def __init__(self) -> None:
        # Loads by the model's path, the least recently used first.
        self._loads: dict[str, asyncio.Future[Tokenizer]] = {}

    async def of(self, path: str) -> "Tokenizer":
        """Return the tokenizer of a model's files. Raises ModelRejected."""
        load = self._loads.pop(path, None)
        if load is None or (load.done() and load.exception() is not None):
            load = asyncio.ensure_future(asyncio.to_thread(lambda: read_model_texts(Path(path)).tokenizer))
        self._loads[path] = load
        if len(self._loads) > MAX_TOKENIZERS:
            del self._loads[next(iter(self._loads))]
        # Several callers may wait for this load, so the cancellation of one must not cancel the load.
        return await asyncio.shield(load)


async def serve_front(control: socket.socket, listening: socket.socket) -> None:
    """Serve until SIGTERM, or until the decoder's process has ended. Raises FrontProtocolError."""
    control.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=control)
    welcome = await read_to_front(reader)
    if not isinstance(welcome, Welcome):
        raise FrontProtocolError("the first message must be Welcome")
    tokenizers = Tokenizers()
    if welcome.model_path:
        # Load the tokenizer before the first connection is accepted.
        await tokenizers.of(welcome.model_path)
    source = FrontSource(reader, writer, tokenizers.of, has_many=not welcome.model_path)
    face = OpenAiFace(source, distinct_keys(welcome.tenant_keys))
    # The decoder's process serves all other paths: the page, metrics, health, and the model's description.
    routes = [*completion_routes(face), Mount("/", InnerProxy(welcome.inner_path))]
    app = Starlette(routes=routes, exception_handlers=ERROR_REPLIES, middleware=browsers_of(welcome.cors_origins))

    def on_begin(_: object) -> None:
        writer.write(frame(FrontReady()))

    async def receive() -> None:
        await source.run()
        # Without the decoder's process, nothing can be computed. Exit, so that the callers' connections close at once.
        os._exit(LOST)

    receiving = asyncio.create_task(receive())
    hosts = known_hosts(listening, welcome.host_names, welcome.cors_origins)
    await serve_within(
        app, listening, hosts=hosts, stop_s=welcome.stop_s, began=on_begin, keeps_path=False, refuse=refuse
    )
    # The streams have ended. Cancel the task, which would exit with LOST when the connection closes.
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    writer.close()


def main() -> None:
    # Ignore SIGHUP, which may be sent to the whole process group to reload the settings.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    control, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    asyncio.run(serve_front(control, listening))


if __name__ == "__main__":
    end_imports()
    main()
