"""A prompt being continued, from its caller's view: `Generation` is an iterator over tokens."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.decode_errors import CompletionReason, RequestRejected
from gpulease.client.decode.decode_requests import PromptRequest
from gpulease.client.decode.pooling import PooledRows


@dataclass(slots=True)
class Emitted:
    """A token of a sequence.

    Attributes:
        token: The token.
        position: Its index in the sequence; the prompt's first token has index 0.
        log_probability: The natural logarithm of its probability, before temperature, top_p and top_k.
        attempt: How often the sequence was replayed before this token. Replays do not change the tokens.
        ranks: The likeliest tokens at this position, with the logarithms of their probabilities, if the caller
            requested them.
    """

    token: int
    position: int
    log_probability: float
    attempt: int = field(default=0, compare=False)
    ranks: tuple[tuple[int, float], ...] = ()

    @property
    def parts(self) -> "EmittedParts":
        return self.token, self.position, self.log_probability, self.attempt, self.ranks


EmittedParts = tuple[int, int, float, int, tuple[tuple[int, float], ...]]
"""The attributes of an `Emitted`, in the same order. Making a tuple takes a fifth of the time."""


class Generation:
    """A prompt being continued, from `Decoder.submit`: iterate over its tokens as they come.

    Attributes:
        request_id: Its id.
        request: The request; after a replay, the last replay's request.
        reason: Why it ended; None while it is in progress.
        error: The error that the iterator raises after the last token. None while the generation is in progress, or if
            it ended without an error.
        failure: An error with which the request must end even though the engine did not fail; usually None.
        replays: How often it was replayed, because its tenant's region or the engine was lost.
        tokens: All tokens that it has emitted.
        reused_tokens: Number of the prompt's tokens for which keys and values were reused and not computed.
        pooled: The prompt's rows, if the request asks for a pooled vector. Complete before the first token is emitted.
        prompt_scores: The prompt's tokens from its second on, if the request asks for scores. Complete before the first
            token is emitted.
    """

    # Every step reads and changes these attributes of a thousand generations, so keep them close together in memory.
    __slots__ = (
        "__weakref__",
        "_cancel",
        "_emitted",
        "_on_change",
        "_waiter",
        "error",
        "failure",
        "pooled",
        "prompt_scores",
        "reason",
        "replays",
        "request",
        "request_id",
        "reused_tokens",
        "tokens",
    )

    def __init__(self, request: PromptRequest, cancel: Callable[["Generation"], None]) -> None:
        self.request_id = request.request_id
        self.request = request
        self.reason: CompletionReason | None = None
        self.failure: RequestRejected | None = None
        self.replays = self.reused_tokens = 0
        self.tokens: list[int] = []
        self.prompt_scores: list[Emitted] = []
        self.pooled: PooledRows | None = None
        self._cancel = cancel
        self._emitted: deque[EmittedParts] = deque()
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_change: Callable[[], None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Emitted:
        """Wait for the next token.

        If the caller has cancelled the generation, the iterator ends without an error.

        Raises:
            AdmissionRefused: The request or its replay is refused.
            WaitedTooLong: The request was not admitted in time.
            EngineDecodeFailed: The engine was lost, and no other one came in time.
            RequestBreaksEngine: This request ended an engine.
            SequenceEnded: The sequence was ended and is not replayed.
            NoModelLoaded: The decoder is closed.
            RequestRejected: Another task already iterates.
        """
        while not self._emitted:
            # Check for the end only here, because tokens that were emitted before the end are yielded first.
            if self.error is not None:
                raise self.error
            if self.reason is not None:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RequestRejected("another task waits for this generation's next token", "Let one task iterate")
            # An asyncio.Event would take 50 % longer, at every token of every sequence.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return Emitted(*self._emitted.popleft())

    def cancel(self) -> None:
        """End the generation. From the next step on, other sequences can use its rows."""
        self._cancel(self)

    # --- for a caller that serves many generations, without a task for each ---

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever tokens or the end arrive, and at once if some have arrived already."""
        self._on_change = on_change
        if self._emitted or self.is_ended:
            on_change()

    def take(self) -> list[EmittedParts]:
        """Return the tokens that were emitted since the last call, each as the parts of an `Emitted`."""
        tokens = list(self._emitted)
        self._emitted.clear()
        return tokens

    @property
    def is_ended(self) -> bool:
        return self.reason is not None or self.error is not None

    # --- for the decoder ---

    def emit(
        self, token: int, position: int, log_probability: float, ranks: tuple[tuple[int, float], ...] = ()
    ) -> None:
        self.tokens.append(token)
        # Buffer without a limit: a slow caller must not delay a step, and max_tokens bounds the buffer.
        self._emitted.append((token, position, log_probability, self.replays, ranks))
        self._wake()

    def pool(self, position: int, rows: NDArray[np.float32]) -> None:
        """Add rows of the prompt after the last norm, from `position` on."""
        if self.pooled is None:
            assert self.request.pooling is not None
            self.pooled = PooledRows(self.request.pooling, rows.shape[1])
        self.pooled.add(position, rows)

    def score(self, scored: Emitted) -> None:
        """Add the score of a token of the prompt, unless an earlier attempt has added it."""
        if scored.position == len(self.prompt_scores) + 1:
            self.prompt_scores.append(scored)

    def replay(self, request_id: str) -> None:
        """Continue as another request of the scheduler, with the id `request_id`. The caller's `request_id` stays."""
        # Cancelling must name the scheduler's current request.
        self.request = replace(self.request, request_id=request_id)
        self.replays += 1

    def end(self, reason: CompletionReason, error: Exception | None = None) -> None:
        """End the generation. After the last token its iterator stops, or raises `error`."""
        self.reason, self.error = reason, error
        self._wake()

    def _wake(self) -> None:
        if self._on_change is not None:
            self._on_change()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
