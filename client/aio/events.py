"""A lease's events for asyncio: an async iterator, a task that calls back on a warning, and one that renews a lease."""

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
from gpulease.client.core.lease import OnLoss, RenewalSchedule, Renewed, keep_renewed, raise_untold
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
            self._is_open = True  # not before: cancelled, it begins anew
        event = await drive(self._stream.next())
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """End the subscription; a task that waits for an event stops."""
        self._stream.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stream.wake()
        self._stream.close()


class LeaseEvents(_Events[LeaseEvent]):
    """A lease's events: `async for event in lease.events():`, like `gpulease.client.sync.events.LeaseEvents`."""


class RegionWatch(_Events[ForwardRevoked]):
    """The launches that regions refuse: `async for refused in region.watch():`, until it is closed."""


class _Watch:
    """A task that ends with a block, or by `stop`."""

    _task: asyncio.Task[None]

    async def stop(self) -> None:
        """End the task. Raises what a callback raised."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()


class WarningWatch(_Watch):
    """Calls back from a task on a lease's warnings, like `gpulease.client.sync.events.WarningWatch`."""

    def __init__(self, stream: EventStream, on_warning: OnWarning) -> None:
        self.error: GpuLeaseError | None = None
        self._stream = stream
        self._task = task_of(self._run(on_warning))

    async def stop(self) -> None:
        """Call back no more."""
        await super().stop()

    async def _run(self, on_warning: OnWarning) -> None:
        try:
            await drive(warnings(self._stream, on_warning))
        except GpuLeaseError as error:
            self.error = error


class KeepAlive(_Watch):
    """Renews a lease from a task, like `gpulease.client.KeepAlive`.

    Attributes:
        loss: Why the lease was lost; None while it is not.
    """

    def __init__(self, lease: Renewed, on_loss: OnLoss | None, schedule: RenewalSchedule) -> None:
        self.loss: GpuLeaseError | None = None
        self._on_loss = on_loss
        self._task = task_of(self._keep(weakref.ref(lease), schedule))

    async def stop(self) -> None:
        """Renew no more; the lease then ends at its deadline unless it is freed or renewed by hand."""
        await super().stop()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()
        if kind is None:
            raise_untold(self.loss, self._on_loss)

    async def _keep(self, lease: "weakref.ref[Renewed]", schedule: RenewalSchedule) -> None:
        self.loss = await drive(keep_renewed(lease, schedule))
        if self.loss is not None and self._on_loss is not None:
            self._on_loss(self.loss)


def keep_alive(lease: Renewed, on_loss: OnLoss | None = None, schedule: RenewalSchedule | None = None) -> KeepAlive:
    """Start renewing a lease, from a task, like `gpulease.client.keep_alive`."""
    return KeepAlive(lease, on_loss, schedule or RenewalSchedule())
