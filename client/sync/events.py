"""A lease's events for blocking programs: iterators, a thread that reports warnings, and a thread that renews."""

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
from gpulease.client.core.lease import (
    OnLoss,
    RenewableLease,
    RenewalSchedule,
    check_renewal,
    keep_renewed,
    raise_unreported,
)
from gpulease.client.errors import GpuLeaseError
from gpulease.client.sync.driver import drive

E = TypeVar("E")


class _Events(Iterator[E], Generic[E]):
    """Base of the iterators over a subscription's events."""

    def __init__(self, stream: Subscription[E]) -> None:
        self._stream = stream
        try:
            # Subscribe now, so that no event between this and the first iteration is missed.
            drive(stream.open())
            weakref.finalize(self, stream.close)
        except BaseException:
            stream.close()
            raise

    def __next__(self) -> E:
        # This waits without a limit; `close` and the end of the connection end it.
        event = drive(self._stream.next())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the subscription. A thread that is waiting for the next event stops iterating."""
        # Wake a thread that waits in `__next__`, which ends its iteration.
        self._stream.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Wake the stream first, because another thread may still wait in `__next__`.
        self._stream.wake()
        self._stream.close()


class LeaseEvents(_Events[LeaseEvent]):
    """A lease's events, starting with its present phase: `for event in lease.events():`.

    The iteration ends after the event that reports the lease's end, or when it is closed. It may raise Disconnected.
    """


class RegionWatch(_Events[ForwardRevoked]):
    """Launches that one region, or any region of a lease, refused: `for refused in region.watch():`.

    The iteration ends when it is closed. It may raise Disconnected.
    """


class WarningWatch:
    """Reports every warning of a lease's end to a callback, from a daemon thread, until stopped or the lease ends.

    Attributes:
        error: Why no more warnings will come although the lease has not ended; None while they may come.
    """

    def __init__(self, stream: EventStream, on_warning: OnWarning) -> None:
        self.error: GpuLeaseError | None = None
        self._stream = stream
        self._on_warning = on_warning
        self._thread = threading.Thread(target=self._run, name="gpulease-warnings", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop calling back, and wait for the thread unless it is the caller."""
        self._stream.wake()
        # A callback may stop its own watch, but a thread can't join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            drive(warnings(self._stream, self._on_warning))
        # No caller waits for this thread, so keep the error in the watch.
        except GpuLeaseError as error:
            self.error = error


class KeepAlive:
    """Renews a lease until this object is stopped, its `with` block ends, or the lease is freed, dropped or lost.

    When the lease is lost, for example because a renewal was refused, `on_loss` is called with the error. Without
    `on_loss`, leaving the block raises the error, unless the block is left by another exception. The thread is a daemon
    thread, so it never keeps a program from exiting.

    Attributes:
        loss: Why the lease was lost; None while it is not.
    """

    def __init__(self, lease: RenewableLease, on_loss: OnLoss | None, schedule: RenewalSchedule) -> None:
        self.loss: GpuLeaseError | None = None
        self._on_loss = on_loss
        self._stopped = threading.Event()
        # Use a weak reference, because the thread must not keep the lease from being dropped.
        args = (weakref.ref(lease), schedule)
        self._thread = threading.Thread(target=self._run, args=args, name="gpulease-keep-alive", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._stopped.set()  # after an interrupt the thread may run, and no caller has this object to stop it
            raise

    def stop(self) -> None:
        """Stop renewing. The lease then ends at its deadline, unless it is freed or renewed by hand."""
        self._stopped.set()
        # As in WarningWatch, a callback may call `stop` of its own object.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()
        # An error of the block itself matters more than the loss.
        if kind is None:
            raise_unreported(self.loss, self._on_loss)

    def _run(self, lease: "weakref.ref[RenewableLease]", schedule: RenewalSchedule) -> None:
        self.loss = drive(keep_renewed(lease, schedule, self._stopped))
        # Report the loss here, once. The block does not raise it then.
        if self.loss is not None and self._on_loss is not None:
            self._on_loss(self.loss)


def keep_alive(
    lease: RenewableLease, on_loss: OnLoss | None = None, schedule: RenewalSchedule | None = None
) -> KeepAlive:
    """Renew a lease or region in the background, each time three quarters of its granted time have passed.

    Args:
        lease: The lease or region. It is referenced weakly, so dropping it ends the renewals.
        on_loss: Called once, from the thread, with the error that says why the lease is lost.
        schedule: When to renew; the default is three quarters of the granted time.

    Raises InvalidRequest for an object that is not a lease or region, or for an `on_loss` that is not a function.
    """
    check_renewal(lease, on_loss)
    return KeepAlive(lease, on_loss, schedule or RenewalSchedule())
