"""Turns an answer's tokens into pieces of text, and ends the answer at a stop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.openai.api_errors import CLOSED_REQUEST, FINISHES, ApiError
from gpulease.client.decode.openai.stop_filter import StopFilter
from gpulease.client.decode.openai.tool_formats import CallPart
from gpulease.client.decode.supervisor.generation import Emitted, Generation

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

LEAST_LOG_PROBABILITY: Final = -9999.0
"""Sent in place of the logarithm of 0, which JSON can't represent. OpenAI's API uses the same value."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of an answer.

    Attributes:
        data: The bytes of its text, which may be only part of a character.
        log_probability: The logarithm of its probability; None for a prompt's first token, which has none.
        begin: The offset of its text in the answer, in characters. An echoed prompt counts as part of the answer.
        ranks: For each of the likeliest tokens at this position, its bytes and the logarithm of its probability.
    """

    data: bytes
    log_probability: float | None
    begin: int
    ranks: tuple[tuple[bytes, float], ...] = ()


@dataclass(slots=True)
class AnswerPiece:
    """A piece of an answer.

    Attributes:
        text: The text.
        tokens: Its tokens.
        replays: Number of replays of the sequence so far; None if it has not changed since the last piece.
        finish: Why the answer ended; "" if it continues.
        stop: The stop that ended it; "" if none did.
        calls: Pieces of tool calls.
        prompt_logprobs: For a whole answer, the log-probabilities of its prompt (`prompt_logprobs`), if requested.
    """

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    replays: int | None = None
    finish: str = ""
    stop: str = ""
    calls: list[CallPart] = field(default_factory=list)
    prompt_logprobs: "list[PromptLogprobs | None] | None" = None

    @property
    def is_empty(self) -> bool:
        """Whether it has neither text nor tokens nor a finish reason. Calls do not count."""
        return not (self.text or self.tokens or self.finish)


class AnswerText:
    """An answer's text. A piece is returned when it is certain that no stop begins in it.

    Attributes:
        completion_tokens: Number of tokens that were added.
        log_probability: The sum of their log-probabilities.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stops: Sequence[str],
        end_tokens: frozenset[int],
        offset: int = 0,
        shown: Mapping[int, bytes] | None = None,
        *,
        includes_stop: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            tokenizer: The model's tokenizer.
            stops: Texts that end the answer.
            end_tokens: Tokens that end the sequence.
            offset: Length of the echoed prompt before the answer, in characters.
            shown: The bytes of special tokens that have a text in this answer. Other special tokens have none.
            includes_stop: Whether the stop or the end token is part of the answer.
        """
        self.completion_tokens = 0
        self.log_probability = 0.0
        self._offset = offset
        self._bytes_of, self._end_tokens = tokenizer.bytes_of, end_tokens
        self._stream, self._filter = tokenizer.stream(shown or {}), StopFilter(stops, includes_stop=includes_stop)
        self._includes_stop = includes_stop
        # Tokens with text that was not returned yet, each with the offset of the end of its text.
        self._waiting: list[tuple[TokenText, int]] = []
        self._decoded = self._emitted = 0
        self._replays = 0

    @property
    def is_stopped(self) -> bool:
        return self._filter.is_stopped

    def add(self, emitted: Emitted) -> AnswerPiece:
        """Add a token. Returns the text that is now certain to be part of the answer, with its tokens."""
        self.completion_tokens += 1
        self.log_probability += emitted.log_probability
        text = ""
        # The model's end tokens have no text, but an end token that the caller chose may have one.
        if self._includes_stop or emitted.token not in self._end_tokens:
            # The decoder keeps the bytes of an incomplete character, so a token may add no text yet.
            text = self._stream.add(emitted.token)
            token = token_text(self._bytes_of, emitted, self._offset + self._decoded)
            self._waiting.append((token, self._decoded + len(text)))
        self._decoded += len(text)
        # The filter keeps text that may be the beginning of a stop.
        piece = self._piece(self._filter.add(text), is_last=False)
        if emitted.attempt != self._replays:
            piece.replays = self._replays = emitted.attempt
        return piece

    def end(self, finish: str) -> AnswerPiece:
        """End the answer. Returns the rest of the text, with the finish reason."""
        # An incomplete character at the end becomes U+FFFD, which may complete a stop.
        text = "" if self.is_stopped else self._filter.add(self._stream.end())
        piece = self._piece(text + self._filter.end(), is_last=True)
        piece.finish = "stop" if self.is_stopped else finish
        piece.stop = self._filter.found
        return piece

    def _piece(self, text: str, *, is_last: bool) -> AnswerPiece:
        self._emitted += len(text)
        waiting = self._waiting
        # At the end without a stop, all remaining text is part of the answer.
        if is_last and not self.is_stopped:
            count = len(waiting)
        elif is_last:
            # After a stop, tokens are part of the answer if their text begins before the stop.
            count = sum(token.begin < self._offset + self._emitted for token, _ in waiting)
        else:
            # Before the end, a token is returned with the last part of its text. After a stop, `end` decides which
            # tokens are part of the answer.
            count = next((number for number, (_, end) in enumerate(waiting) if end > self._emitted), len(waiting))
            if self.is_stopped:
                count = 0
        tokens = [token for token, _ in waiting[:count]]
        del waiting[:count]
        return AnswerPiece(text, tokens)


def token_text(bytes_of: Callable[[int], bytes], emitted: Emitted, begin: int) -> TokenText:
    """Return a token with its bytes, and the bytes of the likeliest tokens at its position."""
    ranks = tuple((bytes_of(token), max(log, LEAST_LOG_PROBABILITY)) for token, log in emitted.ranks)
    log = max(emitted.log_probability, LEAST_LOG_PROBABILITY)
    return TokenText(bytes_of(emitted.token), log, begin, ranks)


def echo(tokenizer: "Tokenizer", prompt: Sequence[int], scores: Sequence[Emitted]) -> AnswerPiece:
    """Return a prompt as the first piece of its answer.

    `scores` has the log-probabilities of the prompt's tokens from the second on. The piece contains the first token and
    the scored tokens.
    """
    stream, piece = tokenizer.stream(), AnswerPiece()
    for place, token in enumerate(prompt):
        begin = len(piece.text)
        piece.text += stream.add(token)
        if place == 0:
            piece.tokens.append(TokenText(tokenizer.bytes_of(token), None, begin))
        elif place <= len(scores):
            piece.tokens.append(token_text(tokenizer.bytes_of, scores[place - 1], begin))
    piece.text += stream.end()
    return piece


PromptLogprobs = dict[str, dict[str, Any]]
"""The log-probabilities at one position of a prompt, by token id, in vLLM's format."""


PROMPT_TOKENS_AT_ONCE: Final = 32
"""Number of a prompt's tokens that are processed in one turn of the event loop. They take about 5 ms."""


async def prompt_logprobs(
    tokenizer: "Tokenizer", scores: Sequence[Emitted], ranks: int
) -> "list[PromptLogprobs | None]":
    """Return an entry for each token of a prompt.

    The first entry is None, because the first token has no probability. Each other entry has the log-probabilities of
    the token itself and of the `ranks` likeliest tokens at its position. The token's rank is None if it is not among
    the likeliest tokens that the engine computed.

    Other tasks run in between, because a long prompt takes seconds.
    """
    names, logprobs = tokenizer.special_tokens, list[PromptLogprobs | None]([None])
    for number, score in enumerate(scores):
        if number % PROMPT_TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
        places = {token: place for place, (token, _) in enumerate(score.ranks, 1)}
        # As in vLLM, the token itself comes first. It may be among the likeliest, too.
        logs = {score.token: score.log_probability} | dict(score.ranks[:ranks])
        logprobs.append(
            {
                str(token): {
                    "logprob": max(log, LEAST_LOG_PROBABILITY),
                    "rank": places.get(token),
                    "decoded_token": names.get(token) or tokenizer.bytes_of(token).decode(errors="replace"),
                }
                for token, log in logs.items()
            }
        )
    return logprobs


async def pieces(generation: Generation, answer: AnswerText) -> AsyncIterator[AnswerPiece]:
    """Yield an answer's pieces as they are computed. The last one has the finish reason.

    Raises the generation's errors, and ApiError if the generation was cancelled before the answer was complete.
    """
    replays: int | None = None
    async for emitted in generation:
        piece = answer.add(emitted)
        # Keep the number of replays until a piece is yielded.
        replays = piece.replays = replays if piece.replays is None else piece.replays
        # No further token can be part of the answer, so cancel the generation.
        if answer.is_stopped:
            generation.cancel()
            break
        if not piece.is_empty:
            replays = None
            yield piece
    else:
        piece = AnswerPiece(replays=replays)
    # A stop cancels the generation, but for the caller this is a normal end.
    finish = "stop" if answer.is_stopped else FINISHES.get(generation.reason) if generation.reason else None
    if finish is None:
        raise ApiError(CLOSED_REQUEST, "closed", "The request was cancelled before its answer was complete.")
    # Add the text and tokens that the loop has not yielded.
    last = answer.end(finish)
    last.text, last.tokens = piece.text + last.text, piece.tokens + last.tokens
    last.replays = replays
    yield last
