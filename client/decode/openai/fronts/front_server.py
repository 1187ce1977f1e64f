"""Runs in the decoder's process: starts the fronts, submits their requests, and sends them the tokens of each step.

If a front ends, stops reading or sends an invalid message, its streams are lost, its requests are cancelled, and
another process is started. Callers of other fronts are not affected.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gpulease.client.decode.blocked_sighup import sighup_blocked
from gpulease.client.decode.first_ended import answer_within
from gpulease.client.decode.openai.completion_intake import Submitted, reply_to_error
from gpulease.client.decode.openai.fronts.front_messages import (
    Begin,
    Cancel,
    Drop,
    End,
    FromFront,
    FrontProtocolError,
    FrontReady,
    FrontRefused,
    Loading,
    Placed,
    PlaceRequest,
    RequestSubmitted,
    Reuse,
    Sequence,
    SequenceTokens,
    Step,
    ToFront,
    Welcome,
    frame,
    read_from_front,
)
from gpulease.client.decode.openai.served_models import RequestPlace, Route, ServedModels
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.text.text_jobs import packed
from gpulease.client.errors import GpuLeaseError
from gpulease.client.http.uvicorn_server import MAX_CONNECTIONS, listening
from gpulease.protocol.back_off import back_off_s

MAX_UNREAD_BYTES: Final = 64 << 20
"""Maximum bytes that wait for a front to read them. A front that hangs is ended at this number. The message for a step
with a thousand tokens has about 50 kB."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Maximum seconds before a front is started again. The first pause is FIRST_PAUSE_S, and each pause is twice the
previous one.
"""

START_LIMIT_S: Final = 60.0
"""Maximum time, in seconds, until a front has loaded its tokenizer and accepts connections."""


class FrontsFailed(GpuLeaseError):
    """A front ended, or did not accept connections within START_LIMIT_S."""

    default_hint = "Its own output says why. With http_processes = 0, the decoder's process serves HTTP itself"


@dataclass(eq=False, slots=True)
class _FrontRequest:
    """A request of a front, from the time it gets a place until its last sequence ends."""

    tenant: str
    place: AsyncExitStack
    request_place: RequestPlace
    request_id: str = ""
    task: "asyncio.Task[None] | None" = None
    generations: "dict[int, Generation]" = field(default_factory=dict)


class FrontConnection:
    """One front's requests. The owner passes messages to `receive`, and calls `close` at the end.

    Args:
        models: The server's models.
        send: Sends a message to the front.
    """

    def __init__(self, models: ServedModels, send: Callable[[ToFront], None]) -> None:
        self._models, self._send = models, send
        self._requests: dict[int, _FrontRequest] = {}
        self._last_number = 0
        # Sequences with unsent results. The next turn of the event loop sends all of them, so that each step needs one
        # message.
        self._changed: dict[tuple[int, int], Generation] = {}

    async def receive(self, message: FromFront) -> None:
        """Handle a message. Raises FrontProtocolError for a message that a correct front would not send."""
        if isinstance(message, PlaceRequest):
            await self._acquire_place(message)
        elif isinstance(message, Begin):
            request = self._requests.get(message.number)
            # A request may begin only once, and only if it has a place.
            if request is None or request.task is not None:
                raise FrontProtocolError(f"request {message.number} has no place to begin with")
            request.request_id = message.request_id
            request.task = asyncio.create_task(self._begin(request, message))
        elif isinstance(message, Cancel):
            # The sequence may have ended already.
            request = self._requests.get(message.number)
            if request is not None and (generation := request.generations.get(message.sequence)):
                generation.cancel()
        elif isinstance(message, Drop):
            await self._drop(message.number)

    async def close(self) -> None:
        """Cancel all requests, because the front has ended."""
        for number in list(self._requests):
            await self._drop(number)

    async def _acquire_place(self, message: PlaceRequest) -> None:
        # Numbers must increase, so that a message can't use another request's number.
        if message.number <= self._last_number or not self._models.has_tenant(message.tenant):
            raise FrontProtocolError(f"request {message.number} of {message.tenant!r} can't begin")
        if len(self._requests) >= MAX_CONNECTIONS:
            raise FrontProtocolError(f"more than {MAX_CONNECTIONS} requests at a time")
        self._last_number = message.number
        place = AsyncExitStack()
        try:
            request_place = await place.enter_async_context(self._models.place(message.tenant))
        except Exception as error:
            self._refuse(message.number, error, message.tenant, "")
            return
        self._requests[message.number] = _FrontRequest(message.tenant, place, request_place)
        self._send(Placed(message.number))

    async def _begin(self, request: _FrontRequest, message: Begin) -> None:
        try:
            # The front also needs the result of `read`, so read and submit separately.
            async with request.place:
                route = Route(message.model or None, message.is_stream)
                source = await request.request_place.source(
                    message.body, lambda: self._send(Loading(message.number)), route
                )
                answer = await source.read(request.tenant, message.body, is_chat=message.is_chat)
                submitted = await source.submit(request.tenant, message.request_id, answer, is_chat=message.is_chat)
                request.request_place.hold(submitted.generations)
        except Exception as error:
            self._requests.pop(message.number, None)
            self._refuse(message.number, error, request.tenant, message.request_id)
            return
        request.generations = dict(enumerate(submitted.generations))
        self._send(_submitted_message(message.number, packed(answer), submitted, request.request_place.path()))
        # Watch the sequences after RequestSubmitted is sent, because their tokens must come later.
        for sequence, generation in list(request.generations.items()):
            self._watch(message.number, sequence, generation)

    def _watch(self, number: int, sequence: int, generation: Generation) -> None:
        key = number, sequence

        def on_change() -> None:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._send_step)
            self._changed[key] = generation

        generation.watch(on_change)

    def _send_step(self) -> None:
        changed, self._changed = self._changed, {}
        reuses: list[Reuse] = []
        scores: list[SequenceTokens] = []
        tokens: list[SequenceTokens] = []
        sequence_ends: list[End] = []
        for (number, sequence), generation in changed.items():
            request = self._requests.get(number)
            if request is None:
                continue
            emitted = generation.take()
            # The scores of a prompt are complete when its first token is emitted, so send them with that token.
            if emitted and len(emitted) == len(generation.tokens):
                if generation.reused_tokens:
                    reuses.append(Reuse(number, sequence, generation.reused_tokens))
                if generation.prompt_scores:
                    scores.append(
                        SequenceTokens(number, sequence, [scored.parts for scored in generation.prompt_scores])
                    )
            if emitted:
                tokens.append(SequenceTokens(number, sequence, emitted))
            if generation.is_ended:
                sequence_ends.append(self._end(number, sequence, request, generation))
        self._send(Step(reuses, scores, tokens, sequence_ends))

    def _end(self, number: int, sequence: int, request: _FrontRequest, generation: Generation) -> End:
        del request.generations[sequence]
        if not request.generations:
            del self._requests[number]
        reason = None if generation.reason is None else generation.reason.value
        if generation.error is None:
            return End(number, sequence, reason, None)
        reply = reply_to_error(generation.error, self._models.log, request.tenant, request.request_id)
        return End(number, sequence, reason, reply.parts)

    async def _drop(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        if request.task is not None:
            request.task.cancel()
            await asyncio.gather(request.task, return_exceptions=True)
        # This has no effect if the request has already released its place.
        await request.place.aclose()
        for generation in request.generations.values():
            generation.cancel()

    def _refuse(self, number: int, error: Exception, tenant: str, request_id: str) -> None:
        reply = reply_to_error(error, self._models.log, tenant, request_id)
        self._send(FrontRefused(number, reply.parts))


def _submitted_message(number: int, answer: bytes, submitted: Submitted, path: str) -> RequestSubmitted:
    # The sequences are in the order of the prompts, `tries` for each prompt.
    sequences = tuple(
        Sequence(place // submitted.request.tries, request.sampling.seed, request.max_emitted_tokens)
        for place, request in enumerate(generation.request for generation in submitted.generations)
    )
    return RequestSubmitted(number, answer, sequences, tuple(submitted.end_tokens), submitted.model, path)


# --- the processes ---


@asynccontextmanager
async def fronts(
    count: int, sock: socket.socket, models: ServedModels, welcome: Welcome
) -> AsyncIterator[socket.socket]:
    """Serve HTTP in `count` processes during the block. When the block begins, all processes accept connections.

    When the block ends, they have `welcome.stop_s` seconds to finish their streams.

    Args:
        count: The number of processes.
        sock: The listening socket, on which all processes accept connections.
        models: The server's models.
        welcome: The facts that the fronts need, except for `inner_path`.

    Yields the listening socket on which this process must serve the requests that the fronts forward. Raises
    FrontsFailed if a front does not start.
    """
    # Only this user may enter the folder, because this process relies on the fronts' checks of requests.
    with tempfile.TemporaryDirectory(prefix="gpulease-decode-") as folder:
        path = f"{folder}/inner.sock"
        with listening(f"unix:{path}") as (inner, _):
            async with _processes(count, sock, models, msgspec.structs.replace(welcome, inner_path=path)):
                yield inner


@asynccontextmanager
async def _processes(count: int, sock: socket.socket, models: ServedModels, welcome: Welcome) -> AsyncIterator[None]:
    running = [_Front(sock, models, welcome) for _ in range(count)]
    tasks = [asyncio.create_task(front.run()) for front in running]
    try:
        try:
            await answer_within(asyncio.gather(*(front.started for front in running)), START_LIMIT_S)
        except TimeoutError:
            raise FrontsFailed(f"a front did not start within {START_LIMIT_S:g} s") from None
        yield
    finally:
        for front in running:
            front.stop()
        await asyncio.wait(tasks, timeout=welcome.stop_s + 1.0)
        for front, task in zip(running, tasks, strict=True):
            front.kill()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Front:
    """One front: starts its process, and starts another process when that one ends."""

    def __init__(self, sock: socket.socket, models: ServedModels, welcome: Welcome) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sock, self._models, self._welcome = sock, models, welcome
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    def stop(self) -> None:
        """Ask the process to finish its streams and to end."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def run(self) -> None:
        failures = 0
        while not self._is_stopping:
            began_s = asyncio.get_running_loop().time()
            await self._serve_once()
            if self._is_stopping:
                return
            # A failure of the first process fails the start of the server.
            if not self.started.done():
                self.started.set_exception(FrontsFailed("a front ended before it accepted connections"))
                return
            self._models.log.error("front_lost", status=self._process.returncode or 0 if self._process else 0)
            # The front ran for a while, so reset the count of failures.
            if asyncio.get_running_loop().time() - began_s > LONGEST_PAUSE_S:
                failures = 0
            await asyncio.sleep(back_off_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            failures += 1

    async def _serve_once(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Start a new program, because a process with threads must not fork.
            command = (sys.executable, "-P", "-m", "gpulease.client.decode.openai.fronts.front_process")
            descriptors = theirs.fileno(), self._sock.fileno()
            with sighup_blocked():
                self._process = await asyncio.create_subprocess_exec(
                    *command, *map(str, descriptors), stdin=asyncio.subprocess.DEVNULL, pass_fds=descriptors
                )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)

        def send(message: ToFront) -> None:
            if writer.is_closing():
                return
            # Do not wait for a front to read, because the step loop runs in this process.
            if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._models.log.error("front_reads_nothing", unread_bytes=writer.transport.get_write_buffer_size())
                writer.transport.abort()
                return
            writer.write(frame(message))

        connection = FrontConnection(self._models, send)
        try:
            send(self._welcome)
            while (message := await read_from_front(reader)) is not None:
                if isinstance(message, FrontReady):
                    if not self.started.done():
                        self.started.set_result(None)
                else:
                    await connection.receive(message)
        except FrontProtocolError as error:
            self._models.log.failure("front_protocol", error)
        finally:
            # The process is useless without the connection.
            if not self._is_stopping:
                self.kill()
            await connection.close()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
