"""The way in to a model: what is admitted, how long it may wait, and what is counted of it."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from gpulease.client.errors import GpuLeaseError
from gpulease.client.models.admission import Estimate, Outlook
from gpulease.client.models.endings import is_broken
from gpulease.client.models.line import Line, WaitingRequest
from gpulease.client.models.metrics import ModelMetrics
from gpulease.client.models.settings import ModelSettings
from gpulease.client.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode


class Intake:
    """One model's.

    Attributes:
        line: Who waits.
        batches, starts: What batches, and new leases, take.
        is_running: Whether a batch is computed now.
        is_stopping: Whether nothing more is taken.
        lease_left_s: What was left of the lease when somebody came last; None if there was none.
        trouble: Why there is no lease; None while there is one, or none is wanted.
        stirred: Set whenever the line changes.
    """

    def __init__(self, settings: ModelSettings, metrics: ModelMetrics) -> None:
        self.settings, self._metrics = settings, metrics
        self._loop = asyncio.get_running_loop()
        self.line = Line(settings.max_queue, settings.max_batch)
        self.batches, self.starts = Estimate(), Estimate()
        self.is_running = self.is_stopping = False
        self.lease_left_s: float | None = None
        self.trouble: GpuLeaseError | None = None
        self.stirred = asyncio.Event()

    def submit(self, payload: bytes, deadline_s: float | None, lease_left_s: float | None) -> "asyncio.Future[Outcome]":
        """Admit some items, or refuse them at once; see Instance.submit."""
        now, settings = self._loop.time(), self.settings
        self.lease_left_s = lease_left_s
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        left_s = settings.deadline_ms / 1000 if deadline_s is None else deadline_s
        items = len(payload) // settings.input_bytes
        request = WaitingRequest(payload, items, now, now + left_s, answer)
        answer.add_done_callback(lambda _: self._told(request))
        if refusal := self._refusal(request, left_s):
            answer.set_result(refusal)
        else:
            self._metrics.bytes_in.inc(len(payload))
            self.adopt([request])
        return answer

    def adopt(self, requests: Iterable[WaitingRequest]) -> None:
        """Take requests into the line, as far as there is room."""
        for request in requests:
            if self.is_stopping:
                request.settle(CallError(CallErrorCode.UNAVAILABLE, "the server stops"))
                continue
            if not self.line.join(request):
                text = f"{self.settings.max_queue} items wait already"
                request.settle(CallError(CallErrorCode.QUEUE_FULL, text, self._retry_ms()))
                continue
            if request.timer is not None:
                request.timer.cancel()
            request.timer = self._loop.call_at(request.deadline, self._too_late, request)
        self.changed()

    def put_back(self, requests: list[WaitingRequest]) -> None:
        """Let those that were begun wait once more, in front, if there is time for it."""
        self.line.rejoin(requests)
        for request in requests:
            if request.deadline <= self._loop.time():
                self._too_late(request)
        self.changed()

    def still_worth(self, batch: list[WaitingRequest], lease_left_s: float) -> list[WaitingRequest]:
        """Those that can still be done in their time: what was ahead of them may have taken longer than foretold."""
        now = self._loop.time()
        outlook = replace(self._outlook(now), items_ahead=0, start_s=0.0, lease_left_s=lease_left_s)
        worth = []
        for request in batch:
            if text := outlook.refusal(request.items, request.deadline - now):
                request.settle(CallError(CallErrorCode.TOO_LATE, text, self._retry_ms()))
            else:
                worth.append(request)
        return worth

    def dismiss(self, outcome: CallError) -> None:
        """Answer all who wait."""
        for request in self.line.take_all():
            request.settle(outcome)
        self.changed()

    def changed(self) -> None:
        """The line is another."""
        self._metrics.queue_depth.set(self.line.items)
        self.stirred.set()

    def _refusal(self, request: WaitingRequest, left_s: float) -> CallError | None:
        settings, size = self.settings, len(request.payload)
        if self.is_stopping:
            return CallError(CallErrorCode.UNAVAILABLE, "the server stops")
        if not size or size % settings.input_bytes or request.items > settings.max_batch:
            text = (
                f"{size} bytes; {settings.name} takes 1 to {settings.max_batch} items of {settings.input_bytes} bytes"
            )
            return CallError(CallErrorCode.INVALID_REQUEST, text)
        if self.trouble is not None and is_broken(self.trouble):
            return CallError(CallErrorCode.UNAVAILABLE, f"{settings.name} can't be served: {self.trouble}")
        if self.line.items + request.items > settings.max_queue:
            return CallError(CallErrorCode.QUEUE_FULL, f"{self.line.items} items wait already", self._retry_ms())
        if text := self._outlook(request.at).refusal(request.items, left_s):
            return CallError(CallErrorCode.TOO_LATE, text, self._retry_ms())
        return None

    def _outlook(self, now: float) -> Outlook:
        return Outlook(
            self.line.items,
            self.settings.max_batch,
            self.is_running,
            self.batches.seconds(now),
            0.0 if self.lease_left_s is not None else self.starts.seconds(now),
            self.lease_left_s,
        )

    def _retry_ms(self) -> int:
        return max(1, int(self._outlook(self._loop.time()).expected_s(1) * 1000))

    def _too_late(self, request: WaitingRequest) -> None:
        if self.line.leave(request):
            self.changed()
            code, why = CallErrorCode.TOO_LATE, "it was not begun in its time"
            if self.trouble is not None:
                code, why = CallErrorCode.UNAVAILABLE, f"{why}: there is no lease: {self.trouble}"
            request.settle(CallError(code, why, self._retry_ms()))

    def _told(self, request: WaitingRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if request.answer.cancelled():
            # Its caller went away: nothing is computed for nobody.
            if self.line.leave(request):
                self.changed()
            self._metrics.answered("cancelled")
            return
        outcome = request.answer.result()
        if isinstance(outcome, Answer):
            self._metrics.bytes_out.inc(len(outcome.payload))
            self._metrics.latency_ms.observe((self._loop.time() - request.at) * 1000)
        self._metrics.answered("done" if isinstance(outcome, Answer) else outcome.code.name.lower())
