"""Runs in a front: sends its requests to the decoder's process over a socket pair, and receives their tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_requests import PromptRequest
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_intake import SubmissionPlace, Submitted
from gpulease.client.decode.openai.fronts.front_messages import (
    Begin,
    Cancel,
    Drop,
    FrontProtocolError,
    FrontRefused,
    Loading,
    Placed,
    PlaceRequest,
    RequestSubmitted,
    Step,
    ToFront,
    frame,
    read_to_front,
)
from gpulease.client.decode.openai.prompt_job import completion_of
from gpulease.client.decode.openai.served_models import Route, route_of
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.decode.text.text_jobs import unpacked

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer


class FrontSource:
    """A CompletionSource whose decoder is in another process.

    Args:
        reader, writer: The connection to that process.
        tokenizer: Loads the tokenizer of the model at a path.
        has_many: Whether the server has several models, so that bodies name their model.

    Attributes:
        log: The front's log.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tokenizer: "Callable[[str], Awaitable[Tokenizer]]",
        *,
        has_many: bool,
    ) -> None:
        self.log = DecodeLog()
        self._reader, self._writer, self._load, self._has_many = reader, writer, tokenizer, has_many
        # The path of each model, from the last request for the model. A reload may change the path.
        self._paths: dict[str, str] = {}
        self._on_loading: dict[int, Callable[[], None]] = {}
        self._number = 0
        # The futures of callers that wait for the reply to PlaceRequest or Begin, by the request's number.
        self._waiters: dict[int, asyncio.Future[Placed | Submitted]] = {}
        self._generations: dict[tuple[int, int], Generation] = {}
        self._tenants: dict[int, tuple[str, str]] = {}

    async def tokenizer(self, model: str) -> "Tokenizer":
        return await self._load(self._paths[model])

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[SubmissionPlace]:
        """Take a place for a request. Raises ApiError."""
        self._number += 1
        number = self._number
        try:
            await self._request(number, PlaceRequest(number, tenant))
            yield _FrontPlace(self, number, tenant)
        except BaseException:
            # The request was refused, or its caller has disconnected. Drop makes the decoder's process release it.
            self._send(Drop(number))
            raise

    async def begin(
        self,
        number: int,
        tenant: str,
        body: bytes,
        request_id: str,
        *,
        is_chat: bool,
        on_loading: Callable[[], None],
    ) -> Submitted:
        """Send a request's body to the decoder's process, and wait until its sequences are submitted.

        Raises ApiError.
        """
        # Find the model in this process. For a large body this takes milliseconds, which would delay steps.
        route = route_of(body) if self._has_many else Route()
        self._tenants[number], self._on_loading[number] = (tenant, request_id), on_loading
        message = Begin(number, body, is_chat, request_id, route.model or "", bool(route.stream))
        try:
            submitted = await self._request(number, message)
        finally:
            self._tenants.pop(number, None)
            self._on_loading.pop(number, None)
        if not isinstance(submitted, Submitted):
            raise FrontProtocolError(f"request {number} got a place twice")
        return submitted

    async def run(self) -> None:
        """Receive messages until the decoder's process closes the connection."""
        while (message := await read_to_front(self._reader)) is not None:
            self._receive(message)

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, Step):
            for reuse in message.reuses:
                if generation := self._generations.get((reuse.number, reuse.sequence)):
                    generation.reused_tokens = reuse.tokens
            for scores in message.scores:
                if generation := self._generations.get((scores.number, scores.sequence)):
                    for parts in scores.tokens:
                        generation.score(Emitted(*parts))
            for tokens in message.tokens:
                # The caller may have cancelled the sequence after the tokens were sent.
                if generation := self._generations.get((tokens.number, tokens.sequence)):
                    for token, position, log_probability, attempt, ranks in tokens.tokens:
                        generation.replays = attempt
                        generation.emit(token, position, log_probability, ranks)
            for end in message.ends:
                if generation := self._generations.pop((end.number, end.sequence), None):
                    reason = CompletionReason.ENGINE_ERROR if end.reason is None else CompletionReason(end.reason)
                    generation.end(reason, None if end.error is None else ApiError(*end.error))
        elif isinstance(message, Loading):
            if on_loading := self._on_loading.pop(message.number, None):
                on_loading()
        elif isinstance(message, FrontRefused):
            waiter = self._waiters.pop(message.number, None)
            if waiter is not None and not waiter.done():
                waiter.set_exception(ApiError(*message.reply))
        elif isinstance(message, Placed | RequestSubmitted):
            waiter = self._waiters.pop(message.number, None)
            # Without a waiter, the caller has disconnected and Drop was sent. `_open` creates the generations before
            # the waiter runs, because the next message may already contain their tokens and even their ends.
            if waiter is not None and not waiter.done():
                waiter.set_result(self._open(message) if isinstance(message, RequestSubmitted) else message)

    def _open(self, message: RequestSubmitted) -> Submitted:
        tenant, request_id = self._tenants[message.number]
        completion, prompts = completion_of(unpacked(message.answer))
        generations = []
        for place, sequence in enumerate(message.sequences):
            key = message.number, place
            sampling = replace(completion.sampling, seed=sequence.seed)
            request = PromptRequest(tenant, request_id, prompts[sequence.prompt], sampling, sequence.max_tokens, 0.0)

            def cancel(generation: Generation, key: tuple[int, int] = key) -> None:
                # Act only once. A generation that has ended is no longer in the dictionary.
                if self._generations.pop(key, None) is not None:
                    self._send(Cancel(*key))
                    generation.end(CompletionReason.CANCELLED)

            generation = self._generations[key] = Generation(request, cancel)
            generations.append(generation)
        self._paths[message.model] = message.model_path
        return Submitted(message.model, completion, prompts, generations, frozenset(message.end_tokens))

    async def _request(self, number: int, message: PlaceRequest | Begin) -> Placed | Submitted:
        waiter: asyncio.Future[Placed | Submitted] = asyncio.get_running_loop().create_future()
        self._waiters[number] = waiter
        try:
            self._send(message)
            return await waiter
        except asyncio.CancelledError:
            # The caller was cancelled after the reply had arrived, so cancel the reply's sequences.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                reply = waiter.result()
                for generation in reply.generations if isinstance(reply, Submitted) else ():
                    generation.cancel()
            raise
        finally:
            self._waiters.pop(number, None)

    def _send(self, message: PlaceRequest | Begin | Cancel | Drop) -> None:
        self._writer.write(frame(message))


class _FrontPlace:
    def __init__(self, source: FrontSource, number: int, tenant: str) -> None:
        self._source, self._number, self._tenant = source, number, tenant

    async def begin(
        self, body: bytes, request_id: str, *, is_chat: bool, on_loading: Callable[[], None] = lambda: None
    ) -> Submitted:
        return await self._source.begin(
            self._number, self._tenant, body, request_id, is_chat=is_chat, on_loading=on_loading
        )
