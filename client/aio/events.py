"""A lease's events for asyncio: async iterators, a task that reports warnings, and a task that renews."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from gpulease.client.aio.driver import drive, task_of
from gpulease.client.core.events import (
    EventStream,
    ForwardRevoked,
    LeaseEvent,
    OnWarning,
    Subscription,
    warnings,
)
from gpulease.client.core.lease import (
    OnLoss,
    RenewableLease,
    RenewalSchedule,
    check_renewal,
    keep_renewed,
    raise_unreported,
)
from gpulease.client.errors import GpuLeaseError

E = TypeVar("E")


class _Events(AsyncIterator[E], Generic[E]):
    """Base of the iterators over a subscription's events."""

    def __init__(self, stream: Subscription[E]) -> None:
        self._stream = stream
        self._is_open = False
        weakref.finalize(self, stream.close)

    async def __anext__(self) -> E:
        if not self._is_open:
            await drive(self._stream.open())
            self._is_open = True  # not earlier: if open() is cancelled, the next call must open the stream
        # This waits without a limit; `close` and the end of the connection end it.
        event = await drive(self._stream.next())
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """End the subscription. A task that is waiting for the next event stops iterating."""
        self._stream.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Wake the stream first, because another task may still wait in `__anext__`.
        self._stream.wake()
        self._stream.close()


class LeaseEvents(_Events[LeaseEvent]):
    """A lease's events, starting with its present phase: `async for event in lease.events():`.

    The iteration ends after the event that reports the lease's end, or when it is closed. It may raise Disconnected.
    """


class RegionWatch(_Events[ForwardRevoked]):
    """Launches that one region, or any region of a lease, refused: `async for refused in region.watch():`.

    The iteration ends when it is closed. It may raise Disconnected.
    """


class _Watch:
    """A task that `stop` or the end of its `async with` block ends."""

    _task: asyncio.Task[None]

    async def stop(self) -> None:
        """End the task. Raises the errors of a callback."""
        # Cancel the task and wait until it has left its procedure, which closes its connection.
        self._task.cancel()
        await asyncio.wait((self._task,))
        # If an error of a callback ended the task, raise it here.
        if not self._task.cancelled():
            self._task.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()


class WarningWatch(_Watch):
    """Reports every warning of a lease's end to a callback, from a task, until stopped or the lease ends.

    Attributes:
        error: Why no more warnings will come although the lease has not ended; None while they may come.
    """

    def __init__(self, stream: EventStream, on_warning: OnWarning) -> None:
        self.error: GpuLeaseError | None = None
        self._stream = stream
        # Use task_of(), because a cancelled task must not keep the stream and its connection alive.
        self._task = task_of(self._run(on_warning))

    async def stop(self) -> None:
        """Stop calling back. Raises the errors of a callback."""
        await super().stop()

    async def _run(self, on_warning: OnWarning) -> None:
        try:
            await drive(warnings(self._stream, on_warning))
        # No caller waits for this task, so store the error in the watch.
        except GpuLeaseError as error:
            self.error = error


class KeepAlive(_Watch):
    """Renews a lease until this object is stopped, its `async with` block ends, or the lease is freed, dropped or lost.

    When the lease is lost, for example because a renewal was refused, `on_loss` is called with the error. Without
    `on_loss`, leaving the block raises the error, unless the block is left by another exception.

    Attributes:
        loss: Why the lease was lost; None while it is not.
    """

    def __init__(self, lease: RenewableLease, on_loss: OnLoss | None, schedule: RenewalSchedule) -> None:
        self.loss: GpuLeaseError | None = None
        self._on_loss = on_loss
        # Use a weak reference, because the task must not keep the lease from being dropped.
        self._task = task_of(self._keep(weakref.ref(lease), schedule))

    async def stop(self) -> None:
        """Stop renewing. The lease then ends at its deadline, unless it is freed or renewed by hand."""
        await super().stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()
        # An error of the block itself matters more than the loss.
        if kind is None:
            raise_unreported(self.loss, self._on_loss)

    async def _keep(self, lease: "weakref.ref[RenewableLease]", schedule: RenewalSchedule) -> None:
        self.loss = await drive(keep_renewed(lease, schedule))
        # Report the loss here, once. The block does not raise it then.
        if self.loss is not None and self._on_loss is not None:
            self._on_loss(self.loss)


def keep_alive(
    lease: RenewableLease, on_loss: OnLoss | None = None, schedule: RenewalSchedule | None = None
) -> KeepAlive:
    """Renew a lease or region in the background, each time three quarters of its granted time have passed.

    Args:
        lease: The lease or region. It is referenced weakly, so dropping it ends the renewals.
        on_loss: Called once, from the task, with the error that says why the lease is lost.
        schedule: When to renew; the default is three quarters of the granted time.

    Raises InvalidRequest for an object that is not a lease or region, or for an `on_loss` that is not a function.
    """
    check_renewal(lease, on_loss)
    return KeepAlive(lease, on_loss, schedule or RenewalSchedule())
