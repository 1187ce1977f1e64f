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

# Plain integers, because looking up an enum's member costs as much as the rest of an increment.
_ALLOCATED_BYTES: Final = int(Counter.ALLOCATED_BYTES)
_MOST_ALLOCATED_BYTES: Final = int(Counter.MOST_ALLOCATED_BYTES)
_COPIES: Final = int(Counter.COPIES)
_COPIED_BYTES: Final = int(Counter.COPIED_BYTES)
_PAGES_BYTES: Final = int(Counter.PAGES_BYTES)
_COMPILING_SINCE_NS: Final = int(Counter.COMPILING_SINCE_NS)

_Result = TypeVar("_Result")


NO_OPTIONS: Final = WorkerOptions()
"""The options of a lease that sets none."""


class LeaseOver(Exception):
    """Raised from a wait when the control page shows that the lease has ended."""


class StillRuns(Exception):
    """Raised by `do_not_wait`, because work on the card is in progress."""


def do_not_wait() -> None:
    """A poll for the driver's waits: it raises StillRuns in place of the first wait."""
    raise StillRuns


@dataclass(slots=True, eq=False)
class SessionResources:
    """A session's ledger, context and counters, as its operations use them.

    Attributes:
        ledger: Allocations, modules and their bytes.
        context: The driver's context.
        check_lease: The `Poll` to pass to every call that may wait; raises LeaseOver once the lease is over.
        counters: The control page's counters.
        options: The options of its lease.
        check_sync: The `Poll` of a wait for all launches of a stream or of the session. It also serves the broker.
        stream: The driver's number of the selected stream, into which launches and copies go.
        is_in_place: Whether the session is parked with its bytes on the card, for a direct move to another card.
        is_parked: Whether the session's bytes are in host memory. Then only the calls that the interface allows may use
          the context.
        shows_pages: Whether the broker must know how many bytes a park would move.
        has_changed: Whether a parkable session may have got or lost something that keeps it in its process. The server
          resets it.
        keep_fault: Called with a kernel's fault that a call outside a tenant's request met; it is reported to the
          tenant.
        admit_work: Waits until the time limits admit an operation's work, and counts it as outstanding. For operations
            that pass work to the card only later.
        admit_next: Does the same for the next part of such work, before it is passed to the driver.
        may_have_grown: Whether the context has done something after which the card may hold more memory than the ledger
          counts. `Session.take_growth` resets it.
    """

    ledger: Ledger
    context: Context
    check_lease: Callable[[], None]
    counters: memoryview
    options: WorkerOptions
    may_have_grown: bool = False
    stream: int = 0
    is_parked: bool = False
    is_in_place: bool = False
    shows_pages: bool = False
    has_changed: bool = False
    check_sync: Callable[[], None] = keep_waiting
    keep_fault: Callable[[KernelFault], None] = lambda _fault: None
    admit_work: Callable[[int], None] = lambda _kind: None
    admit_next: Callable[[], None] = keep_waiting

    def call_outside_request(self, call: Callable[[], _Result]) -> _Result:
        """Call the driver outside a tenant's request.

        If the tenant's kernels have faulted, keep the fault for the tenant.
        """
        # A fault raised here belongs to an earlier launch, so keep it and repeat the call.
        try:
            return call()
        except KernelFault as fault:
            self.keep_fault(fault)
            if fault.context_lost:
                raise
            return call()

    def record_usage(self) -> None:
        """Write the slice's charged bytes to the control page, after the session has taken or released memory."""
        self.ledger.rounding_bytes = self.context.rounding_bytes
        self.counters[_ALLOCATED_BYTES] = charged = self.ledger.charged_bytes
        if charged > self.counters[_MOST_ALLOCATED_BYTES]:
            self.counters[_MOST_ALLOCATED_BYTES] = charged
        if self.shows_pages:
            self.counters[_PAGES_BYTES] = self.context.pages_bytes
            self.has_changed = True

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show the broker since when the driver has been compiling: a compiler can't be interrupted."""
        # The broker limits the time, counted from this value.
        self.counters[_COMPILING_SINCE_NS] = time.monotonic_ns()
        try:
            yield
        finally:
            self.counters[_COMPILING_SINCE_NS] = 0

    def compile_kernel(self, kernel: DriverKernel, threads: int) -> None:
        """Compile a kernel before a launch of this many threads.

        Raises DriverError, or LeaseOver if the lease ended during the compilation.
        """
        with self.compiling():
            has_compiled = self.context.compile_kernel(kernel, threads)
        # Compiling may have taken long, so check the lease again before the launch.
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
    """Base of the classes that serve a session's operations, one class for each group of operations.

    Each method marked `serves` serves one operation, as an `Operation`.

    Attributes:
        served: The names of these methods, by operation.
    """

    served: ClassVar[Mapping[Opcode, str]] = {}

    def __init_subclass__(cls) -> None:
        # Take only the methods of the class itself; otherwise a subclass would serve its base's operations twice.
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
