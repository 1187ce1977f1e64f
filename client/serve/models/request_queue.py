"""Whether a request can be done in its time: from what batches took, no clock read here.

Who waits for a model, and which of them make the next batch: numbers in and numbers out, no clock.

What follows from how a lease, or a batch on it, ended: no I/O.

The way in to a model: what is admitted, how long it may wait, and what is counted of it.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from gpulease.client import LeaseEvent, Phase, errors
from gpulease.client.errors import GpuLeaseError
from gpulease.client.serve.models.model_metrics import ModelMetrics
from gpulease.client.serve.models.settings import ModelSettings
from gpulease.client.serve.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode

MEAN_PART: Final = 1 / 8
DEVIATION_PART: Final = 1 / 4
DEVIATIONS: Final = 4
"""How a time is foretold from those before it, as RFC 6298, 2, foretells round trips: mean and four deviations."""

HALF_LIFE_S: Final = 1.0
"""In which an estimate halves while nothing is measured: without it one slow batch could refuse all that would measure
another."""


class Estimate:
    """What the next of its kind will take, in seconds; 0 while nothing is known."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0
        self._measured_at: float | None = None

    def measured(self, took_s: float, now: float) -> None:
        """One took so long."""
        if self._measured_at is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += DEVIATION_PART * (abs(took_s - self._mean_s) - self._deviation_s)
            self._mean_s += MEAN_PART * (took_s - self._mean_s)
        self._measured_at = now

    def seconds(self, now: float) -> float:
        """What to reckon with now."""
        if self._measured_at is None:
            return 0.0
        age_s = max(0.0, now - self._measured_at)
        return (self._mean_s + DEVIATIONS * self._deviation_s) * math.exp2(-age_s / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request finds when it comes.

    Attributes:
        items_ahead: That wait before it.
        max_batch: Items in a batch.
        is_running: Whether a batch is computed now.
        batch_s: What a batch is reckoned to take.
        start_s: What it is reckoned to take until there is a lease; 0 if there is one.
        lease_left_s: What is left of the lease; None if there is none yet.
    """

    items_ahead: int
    max_batch: int
    is_running: bool
    batch_s: float
    start_s: float
    lease_left_s: float | None

    def expected_s(self, items: int) -> float:
        """When so many items more will be done, from now."""
        batches = math.ceil((self.items_ahead + items) / self.max_batch) + self.is_running
        return self.start_s + batches * self.batch_s

    def refusal(self, items: int, left_s: float) -> str:
        """Why they can't be done in `left_s`; "" if they can, as far as can be told."""
        expected_s = self.expected_s(items)
        if expected_s > left_s:
            return f"it would take {expected_s:.3f} s, and has {left_s:.3f} s"
        if self.lease_left_s is not None and expected_s > self.lease_left_s:
            return f"it would take {expected_s:.3f} s, and the lease ends in {self.lease_left_s:.3f} s"
        return ""


MAX_ATTEMPTS: Final = 2
"""How often a request of a pure model is computed at most: a request that ends every lease is not tried for ever."""


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request in line.

    Attributes:
        payload: Its items' inputs.
        items: How many.
        at: When it came, of a monotonic clock in seconds.
        deadline: Until when it is worth beginning.
        answer: Where its outcome goes. Done already if its caller went away.
        attempts: How often it was begun.
        is_alone: Whether it is to have a batch of its own: one before failed with it.
        timer: What answers it at its deadline.
    """

    payload: bytes
    items: int
    at: float
    deadline: float
    answer: "asyncio.Future[Outcome]"
    attempts: int = 0
    is_alone: bool = False
    timer: asyncio.TimerHandle | None = None

    def settle(self, outcome: Outcome) -> None:
        """Answer it, if it is not answered yet."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(outcome)


class BatchQueue:
    """A bounded line, first come first served.

    Args:
        max_items: How many may wait.
        max_batch: How many make a batch at most.

    Attributes:
        items: How many wait.
    """

    def __init__(self, max_items: int, max_batch: int) -> None:
        self.max_items, self.max_batch = max_items, max_batch
        self.items = 0
        self._waiting: deque[WaitingRequest] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def join(self, request: WaitingRequest) -> bool:
        """Put it at the end; False if the line is full."""
        if self.items + request.items > self.max_items:
            return False
        self._waiting.append(request)
        self.items += request.items
        return True

    def rejoin(self, requests: Iterable[WaitingRequest]) -> None:
        """Put those that were begun back where they were, at the front. They had their places, so there is room."""
        for request in reversed(list(requests)):
            self._waiting.appendleft(request)
            self.items += request.items

    def leave(self, request: WaitingRequest) -> bool:
        """Take it out of the line; False if it is not in it."""
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        self.items -= request.items
        return True

    def due_at(self, max_delay_s: float) -> float | None:
        """When the next batch is to begin: at once (0) if it is full, None if nobody waits."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        return 0.0 if self.items >= self.max_batch or first.is_alone else first.at + max_delay_s

    def next_batch(self) -> list[WaitingRequest]:
        """Take the next batch out: those in front, as many as fit; whoever's caller went away is left out."""
        batch: list[WaitingRequest] = []
        items = 0
        while self._waiting:
            request = self._waiting[0]
            is_wanted = not request.answer.done()
            if is_wanted and batch and (request.is_alone or items + request.items > self.max_batch):
                break
            self._waiting.popleft()
            self.items -= request.items
            if is_wanted:
                batch.append(request)
                items += request.items
                if request.is_alone:
                    break
        return batch

    def take_all(self) -> list[WaitingRequest]:
        """Empty it."""
        found = list(self._waiting)
        self._waiting.clear()
        self.items = 0
        return found


FIRST_PAUSE_S: Final = 0.05
"""Before a lease is asked for again; it doubles with each failure that follows without a batch done in between."""

MAX_PAUSE_S: Final = 5.0

PRESSURE_PAUSE_S: Final = 0.5
"""The least where there is no room: a lease somebody else holds mostly lasts for seconds."""

_BROKEN: Final = (errors.LoadFailed, errors.AllocFailed, errors.Denied, errors.Unsupported)

_BY_CAUSE: Final[dict[str, type[errors.GpuLeaseError]]] = {
    "expired": errors.LeaseExpired,
    "orphaned": errors.LeaseExpired,
    "revoked": errors.Revoked,
    "drained": errors.Drained,
    "freed": errors.LeaseFreed,
    "shutdown": errors.Disconnected,
}


class RestartPause:
    """How long to wait before a lease is asked for again.

    Args:
        uniform: Random numbers from 0 to 1.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self._uniform = uniform
        self._failures = 0

    def after(self, error: errors.GpuLeaseError) -> float:
        """Seconds, after this."""
        has_no_room = isinstance(error, errors.CapacityExceeded)
        least_s = PRESSURE_PAUSE_S if has_no_room or is_broken(error) else 0.0
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), MAX_PAUSE_S)
        self._failures += 1
        return max(least_s, pause_s * (0.5 + self._uniform() / 2))

    def succeeded(self) -> None:
        """A batch was done."""
        self._failures = 0


def is_broken(error: errors.GpuLeaseError) -> bool:
    """Whether the model or its settings are to blame: nobody is made to wait for it."""
    return isinstance(error, _BROKEN) or type(error) is errors.InvalidRequest


def ending_of(event: LeaseEvent) -> errors.GpuLeaseError | None:
    """What an event says of the lease's end; None while it lives."""
    if event.phase in (Phase.ACTIVE, Phase.WARNING):
        return None
    kind = _BY_CAUSE.get(event.cause, errors.GpuSessionFailed)
    return kind(f"the lease ended: {event.reason or event.cause}")


def code_of(error: errors.GpuLeaseError) -> CallErrorCode:
    """What those in a batch are told."""
    if isinstance(error, errors.GpuSessionFailed | errors.OperationFailed):
        return CallErrorCode.KERNEL_FAILED
    return CallErrorCode.LEASE_LOST


class RequestIntake:
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
        self.line = BatchQueue(settings.max_queue, settings.max_batch)
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
