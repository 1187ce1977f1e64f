"""A lease's events for programs that block: an iterator, and a thread that calls back on a warning."""

import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from gpulease.client.core.events import EventStream, LeaseEvent, warnings
from gpulease.client.errors import GpuLeaseError
from gpulease.client.waiting import drive

OnWarning = Callable[[LeaseEvent], None]


class LeaseEvents(Iterator[LeaseEvent]):
    """What a lease goes through, from where it stands now: `for event in lease.events():`.

    It ends behind the event of the lease's end, or when it is closed. Next may raise Disconnected.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        drive(stream.open())
        weakref.finalize(self, stream.close)

    def __next__(self) -> LeaseEvent:
        event = drive(self._stream.next())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Hear no more; a thread that waits for an event stops."""
        self._stream.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stream.wake()
        self._stream.close()


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
