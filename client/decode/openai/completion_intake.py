"""Submits completions to the scheduler, independently of HTTP.

`DecoderSource` runs in the process of a model's decoder, and `served_models` finds it for a request. A front has
another source, which sends requests to the decoder's process (`fronts/front_source.py`).
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpulease.client.decode.decode_errors import AdmissionReason, AdmissionRefused, RequestRejected
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_requests import MAX_SEED
from gpulease.client.decode.openai.api_errors import (
    ApiError,
    api_error_of,
    prompt_parameter,
    prompt_too_long,
    too_long,
)
from gpulease.client.decode.openai.completion_request import CompletionRequest, check_reply_scores
from gpulease.client.decode.openai.embeddings import embeddings_reply, inputs_of, vector_of
from gpulease.client.decode.openai.prompt_job import completion_of, read_completion
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.text.grammar import GrammarMasks
from gpulease.client.decode.text.text_jobs import Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_BODY_BYTES: Final = 4 << 20
"""Maximum bytes of a body, which has room for about 500,000 tokens as text or as numbers."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request whose sequences were submitted.

    Attributes:
        model: The model's name.
        request: The request, without its texts.
        prompts: The tokens of each prompt.
        generations: The sequences, in the order of the prompts.
        end_tokens: The tokens that end the sequences.
    """

    model: str
    request: CompletionRequest
    prompts: Sequence[tuple[int, ...]]
    generations: Sequence[Generation]
    end_tokens: frozenset[int]


class SubmissionPlace(Protocol):
    """A tenant's place for one request. The request counts as waiting until its sequences are submitted."""

    async def begin(
        self, body: bytes, request_id: str, *, is_chat: bool, on_loading: Callable[[], None] = lambda: None
    ) -> Submitted:
        """Parse the body in another process, and submit its sequences. Raises ApiError and the decoder's errors.

        If the model is not on the card, waits for it. Calls `on_loading` then, if the request is for a stream.
        """


class CompletionSource(Protocol):
    """Submits completions for the code that serves HTTP.

    Attributes:
        log: The log of the process that serves HTTP.
    """

    log: DecodeLog

    def place(self, tenant: str) -> AbstractAsyncContextManager[SubmissionPlace]:
        """Take a place for a request. Raises AdmissionRefused or ApiError if the tenant has no place left."""

    async def tokenizer(self, model: str) -> "Tokenizer":
        """Return the tokenizer of a model for which a request was submitted."""


class DecoderSource:
    """Serves one model's requests, in the decoder's process.

    Args:
        decoder: The decoder, which must stay open.
        model: The model's name in requests.
        wait_s: Seconds that a request may wait for its admission.
        chat_tokens: Default `max_tokens` of a chat completion.
        aliases: Further names of the model in requests.

    Attributes:
        model: The model's name in requests.
        names: All names of the model in requests; the first is `model`.
    """

    def __init__(
        self, decoder: Decoder, model: str, wait_s: float, chat_tokens: int, aliases: Sequence[str] = ()
    ) -> None:
        self.log, self.model, self.names = decoder.log, model, (model, *aliases)
        self._decoder, self._wait_s, self._chat_tokens = decoder, wait_s, chat_tokens

    async def tokenizer(self) -> "Tokenizer":
        return await self._decoder.tokenizer()

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return the texts of the tokenizer's special tokens, and the source of the chat template."""
        tokenizer, config = await self.tokenizer(), self._decoder.model_config
        names, template = tokenizer.special_tokens, tokenizer.chat_template
        info: dict[str, Any] = {
            "bos_token": None if config.begin_token is None else names.get(config.begin_token),
            "eos_token": names.get(config.end_tokens[0]) if config.end_tokens else None,
            "chat_template": None,
        }
        if template is not None:
            source, tokens, _ = template.arguments
            # The tokenizer's file overrides the tokens of the model's configuration.
            info |= tokens | {"chat_template": source}
        return info

    def has_tenant(self, tenant: str) -> bool:
        return tenant in self._decoder.scheduler.tenants

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Count a request of the tenant as waiting until the block ends. Raises AdmissionRefused."""
        with self._decoder.prompts.place(tenant):
            yield

    async def read(self, tenant: str, body: bytes, *, is_chat: bool, job: Job = read_completion) -> dict[str, Any]:
        """Parse and tokenize a body with `job` in another process. Returns the job's result, for `completion_of`.

        In this process, parsing 4 MiB of JSON or running a template would delay all streams.

        Raises ApiError for a prompt that is longer than the context, and the errors of `PromptIntake.do`.
        """
        more = {"is_chat": is_chat, "fresh_seed": secrets.randbits(31)}
        return await self.do(tenant, job, body, more, is_chat=is_chat)

    async def do(
        self, tenant: str, job: Job, body: bytes, more: Mapping[str, Any] | None = None, *, is_chat: bool = False
    ) -> dict[str, Any]:
        """Run a job on a tenant's body in another process, and return its result. `more` has the job's other arguments.

        Raises ApiError for a text that is longer than the context, and the errors of `PromptIntake.do`.
        """
        arguments = {"body": body, "names": self.names, **(more or {})}
        try:
            return await self._decoder.prompts.do(tenant, job, arguments, is_chat=is_chat)
        except AdmissionRefused as error:
            if error.reason is AdmissionReason.TOO_LARGE:
                raise prompt_too_long(self.room(tenant), error.detail, error.parameter) from None
            raise

    async def submit(
        self, tenant: str, request_id: str, answer: dict[str, Any], *, is_chat: bool, parameter: str = ""
    ) -> Submitted:
        """Submit the result of `read`. The scheduler then counts the request against the tenant's limits.

        If a prompt is too long, the error names `parameter`, or by default the parameter with the prompt.

        Raises ApiError. If the scheduler refuses a sequence at once, cancels the other sequences first.
        """
        request, prompts = completion_of(answer)
        masks = None
        if request.sampling.grammar:
            masks = await self._decoder.grammars.compile(tenant, request.sampling.grammar)
        generations = self._submit(tenant, request_id, request, prompts, masks)
        for generation in generations:
            refused, prompt_request = generation.error, generation.request
            if refused is None:
                continue
            for other in generations:
                other.cancel()
            if isinstance(refused, AdmissionRefused) and refused.reason is AdmissionReason.TOO_LARGE:
                # Use OpenAI's text, from which clients parse how much they must shorten the prompt.
                parameter = parameter or prompt_parameter(is_chat=is_chat)
                raise too_long(
                    self.room(tenant), len(prompt_request.token_ids), prompt_request.max_emitted_tokens, parameter
                )
            raise refused
        return Submitted(self.model, request, prompts, generations, self._decoder.end_tokens(request.sampling))

    async def embed(
        self, tenant: str, request_id: str, answer: dict[str, Any], generations: list[Generation]
    ) -> dict[str, Any]:
        """Compute the vectors of the inputs in `answer`, a result of `read_inputs`. Returns the reply's body.

        At most `max_concurrent` of the inputs are in progress at a time. Their generations are added to `generations`,
        so that the caller can cancel them.

        Raises ApiError, for example if the model can't embed texts, and the errors of a generation.
        """
        pooling = self._decoder.pooling
        if pooling is None:
            text = "The model can only generate text: its files do not say how to pool an embedding."
            raise ApiError(400, "unsupported_model", text, "model")
        inputs, is_base64 = inputs_of(answer, self._decoder.model_config.width)
        places = asyncio.Semaphore(self._decoder.scheduler.tenants[tenant].config.max_concurrent)

        async def embed_one(number: int, tokens: tuple[int, ...]) -> "NDArray[np.float32]":
            async with places:
                try:
                    generation = self._decoder.submit(
                        tokens,
                        max_tokens=1,
                        tenant_id=tenant,
                        wait_s=self._wait_s,
                        request_id=_name_of(tenant, request_id, number),
                        pooling=pooling,
                    )
                except RequestRejected as error:
                    # The decoder's errors name the parameter `prompt`. Here it is `input`.
                    error.parameter = error.parameter and "input"
                    raise
                generations.append(generation)
                try:
                    return await vector_of(generation)
                except AdmissionRefused as error:
                    if error.reason is AdmissionReason.TOO_LARGE:
                        raise prompt_too_long(self.room(tenant), error.detail, "input") from None
                    raise

        tasks = [asyncio.create_task(embed_one(*one)) for one in enumerate(inputs)]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return embeddings_reply(vectors, sum(map(len, inputs)), self.model, is_base64=is_base64)

    def room(self, tenant: str) -> int:
        """Return how many positions a tenant's sequence may have: the context length, or fewer in a small region."""
        scheduler = self._decoder.scheduler
        # While the tenant has no region, use the size of the largest region that it may get.
        state = scheduler.tenants[tenant]
        return min(scheduler.settings.context, PAGE * (state.region_blocks or state.config.max_blocks))

    def _submit(
        self,
        tenant: str,
        request_id: str,
        request: CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        masks: GrammarMasks | None,
    ) -> list[Generation]:
        """Submit a request's sequences: for each prompt `tries` sequences, each with a different seed."""
        most = [self._max_tokens(request, len(prompt), tenant) for prompt in prompts]
        check_reply_scores(request, zip(map(len, prompts), most, strict=True))
        generations: list[Generation] = []
        try:
            for number, (prompt, max_tokens) in enumerate(zip(prompts, most, strict=True)):
                for choice in range(request.tries):
                    place = number * request.tries + choice
                    seed = (request.sampling.seed + choice) % (MAX_SEED + 1)
                    generation = self._decoder.submit(
                        prompt,
                        max_tokens=max_tokens,
                        sampling=replace(request.sampling, seed=seed),
                        tenant_id=tenant,
                        wait_s=self._wait_s,
                        request_id=_name_of(tenant, request_id, place),
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                        # A sequence has one number of ranks, for prompt and answer. The reply leaves out those that
                        # were not requested.
                        ranks=max(request.ranks, request.prompt_ranks or 0),
                        scores_prompt=request.prompt_ranks is not None or (request.is_echo and request.has_logprobs),
                        masks=None if masks is None else masks.fork(),
                    )
                    generations.append(generation)
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations

    def _max_tokens(self, request: CompletionRequest, prompt_tokens: int, tenant: str) -> int:
        if request.max_tokens is not None:
            # If only an echo is requested, compute one token, and do not send it.
            return max(1, request.max_tokens)
        # Use at least 1, so that the scheduler refuses a prompt that leaves no room for an answer.
        return max(1, min(self._chat_tokens, self.room(tenant) - prompt_tokens + 1))


def _name_of(tenant: str, request_id: str, place: int) -> str:
    """Return the decoder's id for one of a request's sequences."""
    # The id begins with the tenant, because two tenants may use the same id, and must not notice each other.
    name = f"{tenant}/{request_id}"
    return f"{name}#{place}" if place else name


def reply_to_error(error: Exception, log: DecodeLog, tenant: str, request_id: str) -> ApiError:
    """Return the reply to an error. Logs details that the caller must not see."""
    api_error = api_error_of(error)
    # Log unexpected errors, and errors with a text that the caller must not see.
    if api_error is None or api_error.message != str(error):
        # The log limits each tenant's lines.
        log.failure("request_failed", error, tenant=tenant, request=request_id)
    return api_error or ApiError(500, "internal_error", "The server failed; its log has details.")
