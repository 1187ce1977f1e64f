"""Handles prompts before they reach the scheduler. Each counts against its tenant's limits before it causes any work.

A text costs the host CPU time before its request is admitted: it is read, put into a template, and tokenized. A request
in this stage counts against the tenant's `max_waiting`, and separate processes do the work (text/text_processes.py).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    ModelRejected,
    RequestRejected,
    TextNotRead,
    decoder_closed,
)
from gpulease.client.decode.decode_log import DecodeLog, cause_of
from gpulease.client.decode.decode_reports import PromptRefused
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.text.text_jobs import Job, TextLimits, read_chat, read_text, unpacked_tokens

if TYPE_CHECKING:
    from gpulease.client.decode.text.text_processes import TextProcesses
    from gpulease.client.decode.text.tokenizer import Tokenizer

SMALLEST_CHAT: Final = [{"role": "user", "content": "hi"}]
"""A chat that every template accepts. If it exceeds a limit, the fault is in the template, not in the messages."""


class PromptIntake:
    """Reads prompts for a decoder. `start` or the first text starts the processes; `stop` ends them.

    Attributes:
        coming: By tenant, the number of requests in this stage: not yet submitted or refused.
        limits: Limits for reading one text. They may be changed only before the first text.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        tokenizer: "Callable[[], Awaitable[Tokenizer]]",
        processes: int,
        report: Callable[[PromptRefused], None],
        log: DecodeLog,
    ) -> None:
        """Prepare without starting a process.

        Args:
            scheduler: Has the tenants and their limits.
            tokenizer: Returns the model's tokenizer.
            processes: Number of processes that read texts.
            report: Called with a report of each request that is refused here.
            log: Logs when a text ended the process that read it.
        """
        self.coming: Counter[str] = Counter()
        self._scheduler, self._tokenizer, self._count = scheduler, tokenizer, processes
        self._on_refused, self._log = report, log
        self.limits = TextLimits()
        self._processes: TextProcesses | None = None
        self._starting: asyncio.Task[TextProcesses] | None = None
        self._is_template_sound: bool | None = None
        self._is_stopped = False

    @contextmanager
    def place(self, tenant_id: str) -> Iterator[None]:
        """Count a request as its tenant's during the block: from before its body is read until it is submitted.

        A tenant has `max_concurrent` + `max_waiting` places.

        Raises AdmissionRefused if no place is free, RequestRejected if the tenant does not exist.
        """
        tenant = self._scheduler.tenants.get(tenant_id)
        if tenant is None:
            raise RequestRejected(f"the decoder has no tenant {tenant_id!r}")
        config, count = tenant.config, len(tenant.live) + len(tenant.waiting)
        # Live, waiting and coming requests share the same places, so a request keeps its place when its state changes.
        if count + self.coming[tenant_id] >= config.max_concurrent + config.max_waiting:
            full = f"{config.max_waiting} of its requests are already waiting"
            if not config.max_waiting:
                full = f"{config.max_concurrent} of its sequences are already in progress"
            detail = f"tenant {tenant_id}: {full}; send this request again later"
            error = AdmissionRefused(AdmissionReason.QUOTA_EXCEEDED, detail, None)
            self._report(tenant_id, error)
            raise error
        self.coming[tenant_id] += 1
        try:
            yield
        finally:
            self.coming[tenant_id] -= 1

    async def read_text(self, tenant_id: str, text: str) -> tuple[int, ...]:
        """Tokenize a text, with the begin token first. Call it within `place`. Raises the errors of `do`."""
        answer = await self.do(tenant_id, read_text, {"text": text})
        return unpacked_tokens(answer["tokens"])

    async def read_chat(
        self, tenant_id: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Put a chat into the model's template and tokenize it.

        Call it within `place`. Raises the errors of `do`.
        """
        arguments = {"messages": list(messages), "variables": dict(variables)}
        answer = await self.do(tenant_id, read_chat, arguments, is_chat=True)
        return unpacked_tokens(answer["tokens"])

    async def do(
        self, tenant_id: str, job: Job, arguments: Mapping[str, Any], *, is_chat: bool = False
    ) -> dict[str, Any]:
        """Run a job for a tenant's prompt in a separate process.

        Raises the errors of `TextProcesses.do`, and ModelRejected for a model without a tokenizer, or whose chat
        template exceeds a limit whatever the messages.
        """
        processes = await self._started()
        # The template is known to be at fault, so do not run it again.
        if is_chat and self._is_template_sound is False:
            raise _broken_template()
        try:
            return await processes.do(tenant_id, job, arguments)
        except TextNotRead as error:
            # Before blaming the tenant, find out whether the template also fails for the smallest chat.
            if is_chat and not await self._is_sound(processes, tenant_id):
                raise _broken_template() from error
            self._report(tenant_id, error)
            raise
        except RequestRejected as error:
            self._report(tenant_id, error)
            raise

    @property
    def replaced(self) -> int:
        """Number of processes that were replaced, because a text exceeded a limit or because the process ended."""
        return 0 if self._processes is None else self._processes.replaced

    async def start(self) -> None:
        """Start the processes, if they are not running yet. Raises ModelRejected, or TextProcessesFailed."""
        await self._started()

    async def stop(self) -> None:
        """End the processes. Calls that wait for them raise NoModelLoaded."""
        self._is_stopped = True
        if self._starting is None:
            return
        # A start that is cancelled ends its own processes. After a completed start, end them here.
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._processes is not None:
            await self._processes.stop()

    def _report(self, tenant_id: str, error: RequestRejected) -> None:
        # Report one of a small set of reasons, because metrics count refusals by reason.
        reason = error.reason if isinstance(error, AdmissionRefused) else type(error).__name__
        self._on_refused(PromptRefused(tenant_id, reason, str(error)))

    async def _started(self) -> "TextProcesses":
        if self._is_stopped:
            raise decoder_closed()
        # All callers share one start. If it failed, the next caller starts again.
        starting = self._starting
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = self._starting = asyncio.create_task(self._start())
        # `wait` does not cancel the start if this caller is cancelled, because others may wait for it.
        await asyncio.wait((starting,))
        if self._is_stopped:
            raise decoder_closed()
        return starting.result()

    async def _start(self) -> "TextProcesses":
        tokenizer = await self._tokenizer()
        # Import this late, because it needs the extra `decode`, like the tokenizer.
        from gpulease.client.decode.text.text_processes import TextProcesses

        context = self._scheduler.settings.context
        # Each process gets the tokenizer and the limits, and the context with which it refuses long texts early.
        self._processes = await TextProcesses.of(tokenizer, context, self._count, self.limits, self._log)
        return self._processes

    async def _is_sound(self, processes: "TextProcesses", tenant_id: str) -> bool:
        """Return whether the model's template stays within the limits for the smallest chat."""
        if self._is_template_sound is None:
            try:
                arguments = {"messages": SMALLEST_CHAT, "variables": {}}
                await processes.do(tenant_id, read_chat, arguments)
                self._is_template_sound = True
            except TextNotRead as error:
                self._log.error("chat_template_refused", cause=cause_of(error))
                self._is_template_sound = False
            except AdmissionRefused:
                return True  # It is not known yet, because no process was free for the check.
            except RequestRejected:
                self._is_template_sound = True
        return self._is_template_sound


def _broken_template() -> ModelRejected:
    return ModelRejected(
        "the model's chat template exceeds the limits of a prompt, whatever the messages",
        "Send a completion request with the prompt as text; the operator can give the model another template",
    )
