"""Forwards requests to the decoder's process: for the page, metrics, health, and everything else but completions."""

import asyncio
import socket
from contextlib import suppress
from typing import Final

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from gpulease.client.decode.first_ended import first_ended
from gpulease.client.decode.openai.api_errors import OVERLOADED, RETRY_AFTER_S, error_of_problem
from gpulease.client.decode.openai.completion_intake import MAX_BODY_BYTES
from gpulease.client.decode.openai.openai_server import error_form_of, id_headers_of, refusal_of, request_id_of
from gpulease.client.http.application import BODY_LIMIT_S, disconnected, read_body
from gpulease.client.http.problems import Problem, RequestRefused

PIECE_BYTES: Final = 64 << 10

STOPPING: Final = Problem(
    OVERLOADED, "stopping", "The server is stopping. Send the request again.", retry_after_s=RETRY_AFTER_S
)
"""The reply when the decoder's process no longer accepts connections."""

_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"})
"""Headers that concern only one connection, which a proxy must not forward (RFC 9110, section 7.6.1)."""


class InnerProxy:
    """The ASGI application that forwards requests.

    Args:
        path: The Unix socket on which the decoder's process serves HTTP.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request over a new connection, and forward the reply as it arrives."""
        request = Request(scope, receive)
        try:
            body = await read_body(request, MAX_BODY_BYTES, BODY_LIMIT_S, "The body")
            sock = await self._connected()
        except (RequestRefused, OSError) as error:
            problem = error.problem if isinstance(error, RequestRefused) else STOPPING
            # The rest of the body may still arrive, so this connection can't be used for another request.
            headers = {"Connection": "close", **id_headers_of(scope, request_id_of(request))}
            await refusal_of(error_of_problem(problem), headers, error_form_of(scope))(scope, receive, send)
            return
        with sock:
            # A stream, such as the page's events, lasts until the decoder's process or the caller closes it.
            answering, _ = await first_ended(self._answer(scope, body, sock, send), disconnected(receive))
            if answering is not None:
                answering.result()

    async def _connected(self) -> socket.socket:
        """Return a new connection to the decoder's process. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, self._path)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _answer(self, scope: Scope, body: bytes, sock: socket.socket, send: Send) -> None:
        connection, loop = h11.Connection(h11.CLIENT), asyncio.get_running_loop()
        # Step 1: send the request, with its length and without the headers of the caller's connection.
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP | {b"content-length"}]
        headers += [(b"connection", b"close")]
        if body:
            headers += [(b"content-length", b"%d" % len(body))]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        request = h11.Request(method=scope["method"], target=target, headers=headers)
        events = (request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage())
        # Send head and body in one piece. If the server refuses the head, it closes the connection after its reply. A
        # body that arrives later would then reset the connection.
        data = b"".join(connection.send(event) or b"" for event in events)
        # The reply may arrive before the whole body was read, and then the rest can't be sent. An asyncio stream would
        # then lose the reply, so send in a separate task and ignore its errors.
        sending = asyncio.create_task(loop.sock_sendall(sock, data))
        try:
            await self._pass_on(connection, sock, send)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _pass_on(self, connection: h11.Connection, sock: socket.socket, send: Send) -> None:
        """Step 2: forward the reply piece by piece. Raises ClientDisconnect if the connection ends before the reply."""
        while True:
            try:
                part = connection.next_event()
            except h11.RemoteProtocolError:
                # The connection ended in the middle of the reply's body.
                raise ClientDisconnect from None
            if part is h11.NEED_DATA:
                piece = b""
                with suppress(ConnectionError):
                    piece = await asyncio.get_running_loop().sock_recv(sock, PIECE_BYTES)
                connection.receive_data(piece)
            elif isinstance(part, h11.Response):
                # The front adds its own Date.
                excluded = _HOP_BY_HOP | {b"date"}
                forwarded = [(bytes(name), bytes(value)) for name, value in part.headers if name not in excluded]
                await send({"type": "http.response.start", "status": part.status_code, "headers": forwarded})
            elif isinstance(part, h11.Data):
                await send({"type": "http.response.body", "body": bytes(part.data), "more_body": True})
            elif isinstance(part, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif not isinstance(part, h11.InformationalResponse):
                # The connection ended before the reply was complete, for example because the server is stopping.
                raise ClientDisconnect
