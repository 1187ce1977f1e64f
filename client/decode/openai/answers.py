"""The answers of one request: one for each prompt and choice, each from a separate generation."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpulease.client.decode.openai.answer_text import (
    AnswerPiece,
    AnswerText,
    PromptLogprobs,
    echo,
    pieces,
    prompt_logprobs,
)
from gpulease.client.decode.openai.completion_request import CompletionRequest
from gpulease.client.decode.openai.tool_formats import ToolCallParser, tool_format_of
from gpulease.client.decode.supervisor.generation import Generation

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer


class CompletionAnswer:
    """One answer.

    Attributes:
        whole: The whole answer, once `collect` has returned.
        completion_tokens: Number of tokens of the answer, without the tokens of an echoed prompt.
        likelihood: The mean log-probability of the answer's tokens.
    """

    def __init__(
        self, tokenizer: "Tokenizer", request: CompletionRequest, end_tokens: frozenset[int], generation: Generation
    ) -> None:
        self.whole = AnswerPiece()
        self._tokenizer, self._request, self._end_tokens = tokenizer, request, end_tokens
        self._calls: ToolCallParser | None = None
        visible_tokens: dict[int, bytes] = {}
        if request.tool_format:
            # A trigger that is a special token normally has no text, so show it for the parser.
            written = tool_format_of(request.tool_format)
            self._calls = ToolCallParser(written)
            trigger = written.trigger
            visible_tokens = {
                token: trigger.encode() for token, name in tokenizer.special_tokens.items() if name == trigger
            }
        self._generation = generation
        self._text = AnswerText(
            tokenizer, request.stops, end_tokens, shown=visible_tokens, includes_stop=request.includes_stop
        )
        self._prompt = generation.request.token_ids

    @property
    def completion_tokens(self) -> int:
        return 0 if self._request.max_tokens == 0 else self._text.completion_tokens

    @property
    def likelihood(self) -> float:
        return self._text.log_probability / max(1, self._text.completion_tokens)

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """Yield the answer's pieces as they are computed. The last one has the finish reason.

        Raises the errors of `answer_text.pieces`.
        """
        if not self._request.is_echo:
            async for piece in pieces(self._generation, self._text):
                if self._calls is None:
                    yield piece
                    continue
                piece.text, piece.calls = self._calls.add(piece.text)
                if piece.finish:
                    piece.text += self._calls.end()
                # An answer that was cut off keeps the reason `length`, even if it has calls.
                if piece.finish == "stop" and self._calls.calls:
                    piece.finish = "tool_calls"
                if piece.calls or not piece.is_empty:
                    yield piece
            return
        # The echo has the prompt's scores, which are complete when the first token arrives.
        offset = len(echo(self._tokenizer, self._prompt, ()).text)
        self._text = AnswerText(
            self._tokenizer, self._request.stops, self._end_tokens, offset, includes_stop=self._request.includes_stop
        )
        is_first = True
        async for piece in pieces(self._generation, self._text):
            if is_first:
                before = echo(self._tokenizer, self._prompt, self._generation.prompt_scores)
                before.finish = "length" if self._request.max_tokens == 0 else ""
                yield before
            is_first = False
            if self._request.max_tokens != 0:
                yield piece

    async def collect(self) -> None:
        """Wait for the end of the answer, and join its pieces in `whole`. Raises the errors of `pieces`."""
        whole = self.whole
        async for piece in self.pieces():
            whole.text += piece.text
            whole.tokens += piece.tokens
            whole.calls += piece.calls
            whole.replays = whole.replays if piece.replays is None else piece.replays
            whole.finish, whole.stop = piece.finish, piece.stop

    async def prompt_logprobs(self) -> list[PromptLogprobs | None] | None:
        """Return the log-probabilities of the prompt; None if the request did not ask for them.

        `collect` must have returned before.
        """
        ranks = self._request.prompt_ranks
        if ranks is None:
            return None
        return await prompt_logprobs(self._tokenizer, self._generation.prompt_scores, ranks)


def best_of(answers: Sequence[CompletionAnswer], count: int) -> Sequence[CompletionAnswer]:
    """Return the `count` likeliest answers, the likeliest first. If these are all answers, keep their order."""
    if count == len(answers):
        return answers
    return sorted(answers, key=lambda answer: -answer.likelihood)[:count]


async def gather_or_cancel(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. On the first error, cancel the others, wait for them, and raise that error."""
    first, *others = parts
    # A single coroutine needs no task.
    if not others:
        await first
        return
    tasks = [asyncio.create_task(part) for part in (first, *others)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
