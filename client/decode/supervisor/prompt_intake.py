"""Prompts before they reach the scheduler: each tenant's are counted before any work is done for them.

A text costs the host CPU time before its request is admitted: it is read, put into a template, and tokenized. A request
in this stage counts against the tenant's `max_waiting`, and the work is done in separate processes
(text/text_processes.py).
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
"""A chat that every template accepts. If this exceeds a limit, the template is at fault and not the messages."""


class PromptIntake:
    """Reads prompts for a decoder. The first text starts the processes, or `start` does; `stop` ends them.

    Attributes:
        coming: By tenant, the number of requests that are in this stage: neither submitted nor refused.
        limits: Limits of reading one text. To change them, set them before the first text.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        tokenizer: "Callable[[], Awaitable[Tokenizer]]",
        processes: int,
        report: Callable[[PromptRefused], None],
        log: DecodeLog,
    ) -> None:
        """Prepare it; no process starts yet.

        Args:
            scheduler: Has the tenants and their limits.
            tokenizer: Returns the model's tokenizer.
            processes: How many processes read texts.
            report: Called with a report of each request that is refused here.
            log: Where texts are logged that ended the process that read them.
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
        """Count a request as its tenant's, from before its body is read until it is submitted within the block.

        A tenant has places for the sequences that may live and the requests that may wait.

        Raises AdmissionRefused if all places are taken, RequestRejected if the tenant does not exist.
        """
        tenant = self._scheduler.tenants.get(tenant_id)
        if tenant is None:
            raise RequestRejected(f"the decoder has no tenant {tenant_id!r}")
        config, count = tenant.config, len(tenant.live) + len(tenant.waiting)
        # Live, waiting and coming requests share the same places, so a request never loses its place on the way.
        if count + self.coming[tenant_id] >= config.max_concurrent + config.max_waiting:
            full = f"{config.max_waiting} of its requests wait"
            if not config.max_waiting:
                full = f"{config.max_concurrent} of its sequences live"
            detail = f"tenant {tenant_id}: {full} already; send it later"
            error = AdmissionRefused(AdmissionReason.QUOTA_EXCEEDED, detail, None)
            self._report(tenant_id, error)
            raise error
        self.coming[tenant_id] += 1
        try:
            yield
        finally:
            self.coming[tenant_id] -= 1

    async def read_text(self, tenant_id: str, text: str) -> tuple[int, ...]:
        """Tokenize a text, with the begin token first. To be called within `place`. Raises the errors of `do`."""
        answer = await self.do(tenant_id, read_text, {"text": text})
        return unpacked_tokens(answer["tokens"])

    async def read_chat(
        self, tenant_id: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Put a chat into the model's template and tokenize it.

        To be called within `place`. Raises the errors of `do`.
        """
        arguments = {"messages": list(messages), "variables": dict(variables)}
        answer = await self.do(tenant_id, read_chat, arguments, is_chat=True)
        return unpacked_tokens(answer["tokens"])

    async def do(
        self, tenant_id: str, job: Job, arguments: Mapping[str, Any], *, is_chat: bool = False
    ) -> dict[str, Any]:
        """Have a process do a job for a tenant's prompt. Raises the errors of `TextProcesses.do`.

        Raises ModelRejected for a model without a tokenizer, and for a chat template that exceeds a limit whatever the
        messages are.
        """
        processes = await self._started()
        # The template is known to be at fault, so do not spend a process on it again.
        if is_chat and self._is_template_sound is False:
            raise _broken_template()
        try:
            return await processes.do(tenant_id, job, arguments)
        except TextNotRead as error:
            # Before the tenant gets the blame, find out whether the template fails for the smallest chat, too.
            if is_chat and not await self._is_sound(processes, tenant_id):
                raise _broken_template() from error
            self._report(tenant_id, error)
            raise
        except RequestRejected as error:
            self._report(tenant_id, error)
            raise

    @property
    def replaced(self) -> int:
        """The number of processes that were replaced because a text exceeded a limit or the process ended."""
        return 0 if self._processes is None else self._processes.replaced

    async def start(self) -> None:
        """Start the processes, if they are not there yet. Raises ModelRejected, or TextProcessesFailed."""
        await self._started()

    async def stop(self) -> None:
        """End the processes. Calls that wait for them raise NoModelLoaded."""
        self._is_stopped = True
        if self._starting is None:
            return
        # A cancelled start ends its own processes; a completed start leaves them to `stop` below.
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._processes is not None:
            await self._processes.stop()

    def _report(self, tenant_id: str, error: RequestRejected) -> None:
        # Metrics count refusals by a small set of reasons.
        reason = error.reason if isinstance(error, AdmissionRefused) else type(error).__name__
        self._on_refused(PromptRefused(tenant_id, reason, str(error)))

    async def _started(self) -> "TextProcesses":
        if self._is_stopped:
            raise decoder_closed()
        # One start serves all callers. If it failed, the next caller starts again.
        starting = self._starting
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = self._starting = asyncio.create_task(self._start())
        # One caller may give up while the others continue; the end of the intake ends all of them.
        await asyncio.wait((starting,))
        if self._is_stopped:
            raise decoder_closed()
        return starting.result()

    async def _start(self) -> "TextProcesses":
        # Imported late: it needs the extra `decode`, like the tokenizer.
        tokenizer = await self._tokenizer()
        from gpulease.client.decode.text.text_processes import TextProcesses

        context = self._scheduler.settings.context
        # Every process gets the same tokenizer and limits, and knows the context for its own early refusals.
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
                return True  # Not known yet: no process was free for it.
            except RequestRejected:
                self._is_template_sound = True
        return self._is_template_sound


def _broken_template() -> ModelRejected:
    return ModelRejected(
        "the model's chat template exceeds the limits of a prompt, whatever the messages",
        "Send a completion request with the prompt as text; the operator can give the model another template",
    )
