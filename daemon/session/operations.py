"""The base of all operations of a session, and the resources that they share."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Final, TypeVar

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import Context, DriverKernel, KernelFault, keep_waiting
from gpulease.daemon.session.ledger import Ledger
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import Frame
from gpulease.protocol.lease_options import WorkerOptions
from gpulease.protocol.opcodes import Opcode

# Plain integers: looking up a member of its enum costs as much as the rest of an increment.
_ALLOCATED_BYTES: Final = int(Counter.ALLOCATED_BYTES)
_MOST_ALLOCATED_BYTES: Final = int(Counter.MOST_ALLOCATED_BYTES)
_COPIES: Final = int(Counter.COPIES)
_COPIED_BYTES: Final = int(Counter.COPIED_BYTES)
_PAGES_BYTES: Final = int(Counter.PAGES_BYTES)
_COMPILING_SINCE_NS: Final = int(Counter.COMPILING_SINCE_NS)

_Result = TypeVar("_Result")


NO_OPTIONS: Final = WorkerOptions()
"""Of a lease that gives no option."""


class LeaseOver(Exception):
    """Raised out of a wait when the control page shows that the lease is over."""


@dataclass(slots=True, eq=False)
class SessionResources:
    """A session's ledger, context and counters, as its operations use them.

    Attributes:
        ledger: Allocations, modules and their bytes.
        context: The driver's context.
        check_lease: The `Poll` for every call that may wait; raises LeaseOver once the lease is over.
        counters: The control page's counters.
        options: The options of its lease.
        check_sync: The `Poll` of a wait for all launches of a stream or of the session: it also serves the broker.
        stream: The driver's number of the stream that launches and copies go into now.
        is_parked: The session's bytes are in host memory: nothing may use the context but what the interface allows.
        shows_pages: Whether the broker must know what a park would move.
        keep_fault: Called with a kernel's fault that a call met without a tenant's request, to report it to the tenant.
        admit_work: Waits until the limits of time admit work of an operation, and counts it as outstanding; for
          operations that put work on the card only after a while.
        admit_next: The same for the next part of such work, before the driver gets it.
        may_have_grown: The context did something after which the card may hold more memory than the ledger counts.
          `Session.take_growth` resets it.
    """

    ledger: Ledger
    context: Context
    check_lease: Callable[[], None]
    counters: memoryview
    options: WorkerOptions
    may_have_grown: bool = False
    stream: int = 0
    is_parked: bool = False
    shows_pages: bool = False
    check_sync: Callable[[], None] = keep_waiting
    keep_fault: Callable[[KernelFault], None] = lambda _fault: None
    admit_work: Callable[[int], None] = lambda _kind: None
    admit_next: Callable[[], None] = keep_waiting

    def aside(self, ask: Callable[[], _Result]) -> _Result:
        """Call the driver for something that the tenant did not request. A fault of its kernels is kept for it."""
        # A fault met here belongs to an earlier launch, so the question is asked again after it is kept.
        try:
            return ask()
        except KernelFault as fault:
            self.keep_fault(fault)
            if fault.context_lost:
                raise
            return ask()

    def record_usage(self) -> None:
        """Show the broker the slice's charged bytes, after the session has taken or released something."""
        self.ledger.rounding_bytes = self.context.rounding_bytes
        self.counters[_ALLOCATED_BYTES] = charged = self.ledger.charged_bytes
        if charged > self.counters[_MOST_ALLOCATED_BYTES]:
            self.counters[_MOST_ALLOCATED_BYTES] = charged
        if self.shows_pages:
            self.counters[_PAGES_BYTES] = self.context.pages_bytes

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show the broker since when the driver compiles, because a compiler can't be interrupted."""
        # The broker bounds the time from this word on.
        self.counters[_COMPILING_SINCE_NS] = time.monotonic_ns()
        try:
            yield
        finally:
            self.counters[_COMPILING_SINCE_NS] = 0

    def compile_kernel(self, kernel: DriverKernel) -> None:
        """Compile a kernel before its first launch. Raises LeaseOver if the lease ended meanwhile, or DriverError."""
        with self.compiling():
            has_compiled = self.context.compile_kernel(kernel)
        # Compiling may have taken long, so the lease is checked before the launch.
        if has_compiled:
            self.check_lease()


Operation = Callable[[Frame], bytes | memoryview]
"""Serves one request and returns its reply. Raises BodyError, Refused, DriverError or LeaseOver."""

_Method = TypeVar("_Method", bound=Callable[..., bytes | memoryview])


def serves(op: Opcode) -> Callable[[_Method], _Method]:
    """Mark the method of an `OperationHandler` class that serves an operation."""

    def mark(method: _Method) -> _Method:
        vars(method)[_MARK] = op
        return method

    return mark


_MARK: Final = "serves"


class OperationHandler:
    """Base of the classes that serve a session's operations, one class for each kind.

    Each method marked `serves` serves one operation, as an `Operation`.

    Attributes:
        served: The names of these methods, by operation.
    """

    served: ClassVar[Mapping[Opcode, str]] = {}

    def __init_subclass__(cls) -> None:
        # Only methods of the class itself: a subclass would otherwise serve its base's operations twice.
        methods = {name: method for name, method in vars(cls).items() if hasattr(method, _MARK)}
        cls.served = {getattr(method, _MARK): name for name, method in methods.items()}

    def __init__(self, resources: SessionResources) -> None:
        self._resources = resources
        self._ledger = resources.ledger
        self._context = resources.context
        self._check_lease = resources.check_lease
        self._counters = resources.counters
        self._record_usage = resources.record_usage

    def _count_copy(self, size_bytes: int) -> None:
        self._counters[_COPIES] += 1
        self._counters[_COPIED_BYTES] += size_bytes
