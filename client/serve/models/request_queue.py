"""`RequestIntake`: the bounded queue of one model, admission by predicted durations, and deadlines."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from gpulease.client.errors import GpuLeaseError
from gpulease.client.http.caller_text import text_for_callers
from gpulease.client.serve.models.model_metrics import ModelMetrics
from gpulease.client.serve.models.model_settings import ModelSettings
from gpulease.client.serve.models.recovery import is_broken
from gpulease.client.serve.rpc import Answer, Outcome
from gpulease.protocol.rpc import CallError, CallErrorCode

MAX_ATTEMPTS: Final = 2
"""Maximum number of attempts at a request of a pure model, so that a request that ends every lease is not tried
forever."""


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request in the queue.

    Attributes:
        payload: The inputs of its items.
        items: The number of items.
        arrived_s: The time at which it arrived, in monotonic seconds.
        deadline_s: The time after which its computation must not begin, in monotonic seconds.
        answer: The future of its outcome, which is cancelled if the caller disconnects.
        attempts: Number of batches with this request that have begun.
        is_alone: Whether it must be computed in a separate batch, because a batch that contained it has failed.
        timer: Refuses it at its deadline.
    """

    payload: bytes
    items: int
    arrived_s: float
    deadline_s: float
    answer: "asyncio.Future[Outcome]"
    attempts: int = 0
    is_alone: bool = False
    timer: asyncio.TimerHandle | None = None

    def resolve(self, outcome: Outcome) -> None:
        """Answer the request, unless it was answered already."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(outcome)


class BatchQueue:
    """A bounded FIFO queue, from which batches are taken.

    Args:
        max_items: Maximum number of items that wait.
        max_batch: Maximum number of items in a batch.

    Attributes:
        items: The number of items that wait.
    """

    def __init__(self, max_items: int, max_batch: int) -> None:
        self.max_items, self.max_batch = max_items, max_batch
        self.items = 0
        self._waiting: deque[WaitingRequest] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: WaitingRequest) -> bool:
        """Append a request. Returns False if the queue has no room."""
        if self.items + request.items > self.max_items:
            return False
        # First come, first served: a request is never skipped to fill a batch better.
        self._waiting.append(request)
        self.items += request.items
        return True

    def put_first(self, requests: Iterable[WaitingRequest]) -> None:
        """Put requests of a failed batch back at the front, in their order. This may exceed `max_items`."""
        # Reverse the list, because each request goes to the front.
        for request in reversed(list(requests)):
            self._waiting.appendleft(request)
            self.items += request.items

    def remove(self, request: WaitingRequest) -> bool:
        """Remove a request. Returns False if it is not in the queue."""
        try:
            self._waiting.remove(request)
        except ValueError:
            return False
        self.items -= request.items
        return True

    def due_at(self, max_delay_s: float) -> float | None:
        """Return the time at which to begin the next batch: 0 (now) if it is full, None if the queue is empty."""
        if not self._waiting:
            return None
        # A batch is due if it is full, if its oldest request must be computed alone, or if that request has waited long
        # enough.
        first = self._waiting[0]
        return 0.0 if self.items >= self.max_batch or first.is_alone else first.arrived_s + max_delay_s

    def next_batch(self) -> list[WaitingRequest]:
        """Remove and return the requests from the front that fit into a batch.

        Drops requests of callers that disconnected.
        """
        # Take from the front until the batch is full. Requests are never split between batches.
        batch: list[WaitingRequest] = []
        items = 0
        while self._waiting:
            request = self._waiting[0]
            is_wanted = not request.answer.done()
            # Leave a request that does not fit, or that must be computed alone, for the next batch.
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
        requests = list(self._waiting)
        self._waiting.clear()
        self.items = 0
        return requests


class RequestIntake:
    """Admits, queues and times out the requests of one model.

    Attributes:
        queue: Requests that wait.
        batches, starts: Estimates of how long a batch takes, and of how long it takes to acquire a lease and load.
        is_running: Whether a batch is being computed.
        is_stopping: Whether no more requests are admitted.
        lease_left_s: Seconds left of the lease at the last arrival; None without a lease.
        trouble: The error that keeps the model from having a lease; None with a lease, or if none is needed.
        changed_event: Set whenever the queue changes.
    """

    def __init__(self, settings: ModelSettings, metrics: ModelMetrics) -> None:
        self.settings, self._metrics = settings, metrics
        self._loop = asyncio.get_running_loop()
        self.queue = BatchQueue(settings.max_queue, settings.max_batch)
        # Both are 0 until a duration was measured, so that no request is refused for lack of data.
        self.batches, self.starts = Estimate(), Estimate()
        self.is_running = self.is_stopping = False
        self.lease_left_s: float | None = None
        self.trouble: GpuLeaseError | None = None
        self.changed_event = asyncio.Event()

    def submit(self, payload: bytes, deadline_s: float | None, lease_left_s: float | None) -> "asyncio.Future[Outcome]":
        """Admit some items, or refuse them at once. See Instance.submit."""
        now, settings = self._loop.time(), self.settings
        self.lease_left_s = lease_left_s
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        # If the caller sets no deadline, use the model's.
        left_s = settings.deadline_ms / 1000 if deadline_s is None else deadline_s
        items = len(payload) // settings.input_bytes
        request = WaitingRequest(payload, items, now, now + left_s, answer)
        # Add this before a refusal, so that refused requests are counted, too.
        answer.add_done_callback(lambda _: self._on_answered(request))
        # Refuse at once a request that would be late, so that it does not fill the queue.
        if refusal := self._refusal(request, left_s):
            answer.set_result(refusal)
        else:
            self._metrics.bytes_in.inc(len(payload))
            self.adopt([request])
        return answer

    def adopt(self, requests: Iterable[WaitingRequest]) -> None:
        """Queue requests while there is room, and refuse the rest."""
        for request in requests:
            if self.is_stopping:
                request.resolve(CallError(CallErrorCode.UNAVAILABLE, "the server is stopping"))
                continue
            if not self.queue.add(request):
                text = f"{self.settings.max_queue} items already wait, the maximum"
                # This limit also applies to requests that another model passes on.
                request.resolve(CallError(CallErrorCode.QUEUE_FULL, text, self._retry_ms()))
                continue
            if request.timer is not None:
                request.timer.cancel()
            # The timer answers a request at its deadline even if the model has no lease.
            request.timer = self._loop.call_at(request.deadline_s, self._on_deadline, request)
        self.changed()

    def put_back(self, requests: list[WaitingRequest]) -> None:
        """Put requests of a failed batch back at the front of the queue, and refuse those past their deadline."""
        self.queue.put_first(requests)
        for request in requests:
            if request.deadline_s <= self._loop.time():
                self._on_deadline(request)
        self.changed()

    def drop_late(self, batch: list[WaitingRequest], lease_left_s: float) -> list[WaitingRequest]:
        """Return the requests that can still meet their deadlines, and refuse the others.

        Requests may have become late because earlier batches took longer than predicted.
        """
        now = self._loop.time()
        # These requests are next, so nothing is ahead of them and the lease exists.
        forecast = replace(self._forecast(now), items_ahead=0, start_s=0.0, lease_left_s=lease_left_s)
        in_time = []
        for request in batch:
            if text := forecast.refusal(request.items, request.deadline_s - now):
                request.resolve(CallError(CallErrorCode.TOO_LATE, text, self._retry_ms()))
            else:
                in_time.append(request)
        return in_time

    def dismiss(self, outcome: CallError) -> None:
        """Empty the queue, and answer every request in it with an error."""
        for request in self.queue.take_all():
            request.resolve(outcome)
        self.changed()

    def changed(self) -> None:
        """Publish the queue's new depth, and wake the model's task."""
        # Every change of the queue calls this, so that the gauge is never stale.
        self._metrics.queue_depth.set(self.queue.items)
        self.changed_event.set()

    def _refusal(self, request: WaitingRequest, left_s: float) -> CallError | None:
        settings, size = self.settings, len(request.payload)
        if self.is_stopping:
            return CallError(CallErrorCode.UNAVAILABLE, "the server is stopping")
        if not size or size % settings.input_bytes or request.items > settings.max_batch:
            text = (
                f"{size} bytes; {settings.name} takes 1 to {settings.max_batch} items of {settings.input_bytes} bytes"
            )
            return CallError(CallErrorCode.INVALID_REQUEST, text)
        # The model itself is broken, so the request would only wait until its deadline.
        if self.trouble is not None and is_broken(self.trouble):
            text = f"{settings.name} can't be served: {text_for_callers(self.trouble)}"
            return CallError(CallErrorCode.UNAVAILABLE, text)
        if self.queue.items + request.items > settings.max_queue:
            return CallError(CallErrorCode.QUEUE_FULL, f"{self.queue.items} items already wait", self._retry_ms())
        # Check this last, because it is an estimate; the other checks are certain.
        if text := self._forecast(request.arrived_s).refusal(request.items, left_s):
            return CallError(CallErrorCode.TOO_LATE, text, self._retry_ms())
        return None

    def _forecast(self, now: float) -> "Forecast":
        return Forecast(
            self.queue.items,
            self.settings.max_batch,
            self.is_running,
            self.batches.seconds(now),
            # If there is no lease, the model must first acquire one and load.
            0.0 if self.lease_left_s is not None else self.starts.seconds(now),
            self.lease_left_s,
        )

    def _retry_ms(self) -> int:
        return max(1, int(self._forecast(self._loop.time()).expected_s(1) * 1000))

    def _on_deadline(self, request: WaitingRequest) -> None:
        if self.queue.remove(request):
            self.changed()
            code, reason = CallErrorCode.TOO_LATE, "it was not started before its deadline"
            if self.trouble is not None:
                code, reason = CallErrorCode.UNAVAILABLE, f"{reason}: the model has no lease: {self.trouble}"
            request.resolve(CallError(code, reason, self._retry_ms()))

    def _on_answered(self, request: WaitingRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if request.answer.cancelled():
            # The caller disconnected: do not compute its request.
            if self.queue.remove(request):
                self.changed()
            self._metrics.answered("cancelled")
            return
        # This is called at every end of a request, so the metrics count each request exactly once.
        outcome = request.answer.result()
        if isinstance(outcome, Answer):
            self._metrics.bytes_out.inc(len(outcome.payload))
            self._metrics.latency_ms.observe((self._loop.time() - request.arrived_s) * 1000)
        self._metrics.answered("done" if isinstance(outcome, Answer) else outcome.code.name.lower())


MEAN_PART: Final = 1 / 8
DEVIATION_PART: Final = 1 / 4
DEVIATIONS: Final = 4
"""Durations are predicted like retransmission timeouts in RFC 6298, 2: the mean plus four deviations."""

HALF_LIFE_S: Final = 1.0
"""Seconds after which an estimate is halved if nothing was measured. Without this, one slow batch could cause all
requests to be refused, so that no measurement would ever correct the estimate.
"""


class Estimate:
    """Predicts the duration of the next event of a kind, in seconds. The prediction is 0 until one was measured."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0
        self._measured_at: float | None = None

    def add(self, took_s: float, now: float) -> None:
        """Include a duration that was measured at the time `now`."""
        if self._measured_at is None:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            # RFC 6298 (2.3): the deviation is updated with the old mean, before the mean.
            self._deviation_s += DEVIATION_PART * (abs(took_s - self._mean_s) - self._deviation_s)
            self._mean_s += MEAN_PART * (took_s - self._mean_s)
        self._measured_at = now

    def seconds(self, now: float) -> float:
        """Return the predicted duration at the time `now`."""
        if self._measured_at is None:
            return 0.0
        # The weight of old measurements decreases with time.
        age_s = max(0.0, now - self._measured_at)
        return (self._mean_s + DEVIATIONS * self._deviation_s) * math.exp2(-age_s / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The load that a request finds on its arrival.

    Attributes:
        items_ahead: Number of items that wait before the request.
        max_batch: Maximum number of items in a batch.
        is_running: Whether a batch is being computed.
        batch_s: Expected seconds of a batch.
        start_s: Expected seconds until the model has a lease; 0 if it has one.
        lease_left_s: Seconds left of the lease; None without a lease.
    """

    items_ahead: int
    max_batch: int
    is_running: bool
    batch_s: float
    start_s: float
    lease_left_s: float | None

    def expected_s(self, items: int) -> float:
        """Return the expected seconds until `items` further items are done."""
        # Count the running batch, and the batches of all waiting items with these items at their end. This assumes that
        # a batch takes the same time whatever its size, so the estimate may be too high, but rarely too low.
        batches = math.ceil((self.items_ahead + items) / self.max_batch) + self.is_running
        return self.start_s + batches * self.batch_s

    def refusal(self, items: int, left_s: float) -> str:
        """Return why the items will probably not be done in `left_s`; "" if they will."""
        expected_s = self.expected_s(items)
        if expected_s > left_s:
            return f"it would take {expected_s:.3f} s, but must be finished in {left_s:.3f} s"
        # The lease may not be renewed, for example on a drained node, so its end counts as a deadline.
        if self.lease_left_s is not None and expected_s > self.lease_left_s:
            return f"it would take {expected_s:.3f} s, but the lease ends in {self.lease_left_s:.3f} s"
        return ""
