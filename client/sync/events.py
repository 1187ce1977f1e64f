"""A lease's events for programs that block: an iterator, a thread that calls back on a warning, one that renews."""

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

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
from gpulease.client.sync.driver import drive

E = TypeVar("E")


class _Events(Iterator[E], Generic[E]):
    """Base of the iterators over a subscription's events."""

    def __init__(self, stream: Subscription[E]) -> None:
        self._stream = stream
        try:
            drive(stream.open())
            weakref.finalize(self, stream.close)
        except BaseException:
            stream.close()
            raise

    def __next__(self) -> E:
        event = drive(self._stream.next())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the subscription; a thread that waits for an event stops."""
        self._stream.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stream.wake()
        self._stream.close()


class LeaseEvents(_Events[LeaseEvent]):
    """A lease's events, from its present phase on: `for event in lease.events():`.

    It ends behind the event of the lease's end, or when it is closed. Next may raise Disconnected.
    """


class RegionWatch(_Events[ForwardRevoked]):
    """The launches that a region refuses, or any region of a lease: `for refused in region.watch():`.

    It ends when it is closed. Next may raise Disconnected.
    """


class WarningWatch:
    """Calls back whenever a lease is warned of its end, from a daemon thread, until it is stopped or the lease ends.

    Attributes:
        error: Why there will be no more warnings although the lease lives; None while there may be.
    """

    def __init__(self, stream: EventStream, on_warning: OnWarning) -> None:
        self.error: GpuLeaseError | None = None
        self._stream = stream
        self._on_warning = on_warning
        self._thread = threading.Thread(target=self._run, name="gpulease-warnings", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call back no more."""
        self._stream.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            drive(warnings(self._stream, self._on_warning))
        except GpuLeaseError as error:
            self.error = error


class KeepAlive:
    """Renews a lease until it is stopped, its `with` block is left, the lease is dropped or freed, or it is lost.

    A loss, such as a renewal that is refused, goes to `on_loss`. Without that, leaving the block raises it; a block
    that is left by an exception raises that one. The thread is a daemon thread: it never keeps a program from ending.

    Attributes:
        loss: Why the lease was lost; None while it is not.
    """

    def __init__(self, lease: Renewed, on_loss: OnLoss | None, schedule: RenewalSchedule) -> None:
        self.loss: GpuLeaseError | None = None
        self._on_loss = on_loss
        self._stopped = threading.Event()
        args = (weakref.ref(lease), schedule)
        self._thread = threading.Thread(target=self._run, args=args, name="gpulease-keep-alive", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._stopped.set()  # nobody else could: interrupted, the thread may run, and nobody has this object
            raise

    def stop(self) -> None:
        """Renew no more; the lease then ends at its deadline unless it is freed or renewed by hand."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()
        if kind is None:
            raise_untold(self.loss, self._on_loss)

    def _run(self, lease: "weakref.ref[Renewed]", schedule: RenewalSchedule) -> None:
        self.loss = drive(keep_renewed(lease, schedule, self._stopped))
        if self.loss is not None and self._on_loss is not None:
            self._on_loss(self.loss)


def keep_alive(lease: Renewed, on_loss: OnLoss | None = None, schedule: RenewalSchedule | None = None) -> KeepAlive:
    """Start renewing a lease or region for as long as it was granted, each time three quarters of that have passed.

    Args:
        lease: The lease. It may still be dropped.
        on_loss: Called from the thread, once, with the error that says why the lease is lost.
        schedule: When to renew.
    """
    return KeepAlive(lease, on_loss, schedule or RenewalSchedule())
