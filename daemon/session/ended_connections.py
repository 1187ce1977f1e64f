"""Releases what connections have made, after they have ended.

A connection's allocations, modules, graphs and region sets are its own. When it ends, its graphs and sets go at once.
Its allocations and modules go when everything that was queued by then has ended, because its kernels may use them. Only
a request that finds no room without them waits for that, for a bounded time. A kernel without end keeps them until the
lease ends, or until the time that the lease gives a kernel; until then they count as taken.

An older client does not ask for that: what its connection makes has no holder, and stays until MEM_RESET or the lease's
end. The same is true for what was kept by name, which the lease holds.
"""

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import DriverError, KernelFault, Poll, Ticket
from gpulease.daemon.session.graph_operations import GraphOperations
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.kept_buffers import KeepOperations
from gpulease.daemon.session.launches import Planner
from gpulease.daemon.session.modules import ModuleOperations
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.region_operations import RegionOperations
from gpulease.daemon.session.replies import done
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import Frame
from gpulease.protocol.messages import Freed
from gpulease.protocol.opcodes import Opcode, Status

FREES_PER_TURN: Final = 256
"""Most objects that are released before the connections are served again. Stops an end with 65,536 allocations from
delaying the others for as long as all of them take."""

FIRST_PAUSE_S: Final = 0.001
LAST_PAUSE_S: Final = 0.128
"""Pauses between two polls of what an ended connection's kernels use: from the first, each twice the previous one,
to the last. So a worker does not take a core for a kernel without end that an ended connection left."""

ALONE_WAIT_S: Final = 10.0
"""Longest time that a request without room waits for ended connections' kernels if no other connection is attached."""

BESIDE_WAIT_S: Final = 0.1
"""The same with other connections, which are not served meanwhile."""

WAIT_STEP_S: Final = 0.001


class _StillRuns(Exception):
    """Raised by the driver's poll instead of waiting: work of the stream still runs."""


def _do_not_wait() -> None:
    raise _StillRuns


@dataclass(slots=True, eq=False)
class _Ended:
    """A connection that has ended, and still holds something.

    Attributes:
        waits: What has to end before anything of it goes.
        modules: The numbers of its modules, `allocations` the handles of its allocations; others may have freed some.
    """

    holder: Holder
    waits: list[Ticket]
    modules: list[int]
    allocations: list[int]


class EndedConnections(OperationHandler):
    """Releases what ended connections hold.

    Args:
        parts: The operations that know a session's kept allocations, modules, graphs and regions.
        planner: Its plans; none may launch a kernel of a module that goes.

    Attributes:
        unheld: Holds the objects of connections whose clients did not ask for objects to end with them.
        unheld_users: Number of these connections that are attached.
    """

    def __init__(
        self,
        resources: SessionResources,
        parts: tuple[KeepOperations, ModuleOperations, GraphOperations, RegionOperations],
        planner: Planner,
    ) -> None:
        super().__init__(resources)
        self._keeper, self._modules, self._graphs, self._regions = parts
        self._planner = planner
        self.unheld = Holder(resources.counters, Counter.UNHELD_BYTES)
        self.unheld_users = 0
        self._ended: list[_Ended] = []
        self._looks_in_vain = 0
        self._look_s = 0.0

    def end(self, holder: Holder, streams: Iterable[int]) -> None:
        """Release what an ended connection holds, once the present work of its streams has ended.

        Args:
            holder: The connection's holder.
            streams: The driver's numbers of its streams; they are destroyed after this call.
        """
        # Graphs and region sets can go at once: what was replayed runs to its end, and the sets are only lists.
        self._graphs.give_back(holder)
        self._regions.give_back(holder)
        holder.show_at(Counter.UNHELD_BYTES)
        modules, allocations = self._ledger.modules_of(holder), self._ledger.allocations_of(holder)
        if modules or allocations:
            waits: list[Ticket] = []
            # Where a stream can't be marked, what follows waits by itself, or finds that the context is lost.
            with suppress(DriverError):
                waits += [self._resources.aside(partial(self._context.mark, stream)) for stream in streams]
            self._ended.append(_Ended(holder, waits, modules, allocations))
            self._looks_in_vain, self._look_s = 0, 0.0
            self.advance()

    # --- the worker's loop ---

    def sleep_ms(self) -> int | None:
        """Return for how many milliseconds the worker's loop may sleep; None if there is nothing to release."""
        if not self._ended or self._resources.is_parked:
            return None
        return max(0, math.ceil((self._look_s - time.monotonic()) * 1000))

    def advance(self, *, now: bool = False) -> None:
        """Release what needs no wait, if it is time to poll, or at once. What a parked session holds waits for it."""
        if not self._ended or self._resources.is_parked or (not now and time.monotonic() < self._look_s):
            return
        # Success: poll again at once, as more may be free. Failure: back off, so that an endless kernel costs no core.
        if self._give_back():
            self._looks_in_vain, self._look_s = 0, 0.0
        else:
            self._look_s = time.monotonic() + back_off_s(self._looks_in_vain, FIRST_PAUSE_S, LAST_PAUSE_S)
            self._looks_in_vain += 1

    def _give_back(self) -> bool:
        """Release some of what no kernel uses any more, without waiting; return whether that was anything."""
        left = FREES_PER_TURN
        # Each ended connection by itself: one with a running kernel must not keep the others' memory.
        for ended in list(self._ended):
            # Tickets that are done need not be polled again.
            ended.waits = [ticket for ticket in ended.waits if not ticket.is_done()]
            if ended.waits:
                continue
            # Allocations and modules one by one, without a wait inside the driver.
            try:
                while left and (ended.allocations or ended.modules):
                    self._give_back_one(ended)
                    left -= 1
            except _StillRuns:
                continue
            except KernelFault as fault:
                # Keep it after a fault that is already kept.
                self._resources.keep_fault(fault)
                if fault.context_lost:
                    self._ended.remove(ended)
                continue
            except DriverError:
                # Lost with the context, or kept by the driver for good: it counts as taken until the lease ends.
                self._ended.remove(ended)
                continue
            # Nothing is left of it.
            if left:
                self._ended.remove(ended)
        if left != FREES_PER_TURN:
            self._record_usage()
        return left != FREES_PER_TURN

    def _give_back_one(self, ended: _Ended) -> None:
        if ended.allocations:
            handle = ended.allocations[-1]
            # Another connection may have freed it or taken it over meanwhile.
            if self._ledger.holder_of(handle) is ended.holder:
                self._free(handle, _do_not_wait)
            ended.allocations.pop()
            return
        # Another connection may have unloaded it.
        if self._ledger.has_module(ended.modules[-1]):
            self._unload(ended.modules[-1], _do_not_wait)
        ended.modules.pop()

    def _free(self, handle: int, poll: Poll) -> None:
        self._resources.aside(lambda: self._context.mem_free(handle, poll))
        self._ledger.remove_allocation(handle)

    def _unload(self, number: int, poll: Poll) -> None:
        # The plans must not launch its kernels any more.
        self._planner.forget()
        self._resources.aside(lambda: self._modules.give_back(number, poll))

    @property
    def has_any(self) -> bool:
        """Return whether an ended connection holds something."""
        return bool(self._ended)

    # --- those who need room ---

    def may_make_room(self, failure: Failure) -> bool:
        """Return whether a request that failed with this lacks room that ended connections still take."""
        match failure.status:
            case Status.ALLOC_FAILED:
                return any(ended.holder.held_bytes for ended in self._ended)
            case Status.LOAD_FAILED:
                return any(ended.modules for ended in self._ended)
        return False

    def make_room(self, *, is_alone: bool) -> bool:
        """Release what ended connections hold, waiting for running work if necessary.

        Args:
            is_alone: No other connection is attached, which would have to wait, too.

        Returns whether anything was released. Raises LeaseOver.
        """
        # Alone, a long wait harms no one; with others attached it would stop them all.
        until_s = time.monotonic() + (ALONE_WAIT_S if is_alone else BESIDE_WAIT_S)
        has_given = False
        while self._ended:
            if self._give_back():
                has_given = True
            elif time.monotonic() > until_s:
                break
            else:
                # Sleep here and not inside the driver, so that regions open and end meanwhile.
                time.sleep(WAIT_STEP_S)
                self._resources.check_sync()
        return has_given

    def explained(self, failure: Failure) -> Failure:
        """Return a failure for lack of room that says what ended connections still hold."""
        held_bytes = sum(ended.holder.held_bytes for ended in self._ended)
        if not held_bytes:
            return failure
        return replace(
            failure,
            message=f"{failure.message}; {held_bytes} more are of connections that have ended "
            "while their kernels still run",
            hint="Wait for those kernels; one without end is ended by max_kernel_secs, or with its lease.",
        )

    @serves(Opcode.MEM_RESET)
    def reset(self, frame: Frame) -> bytes:
        """Serve MEM_RESET: wait as SYNC does, then release everything that no attached connection holds."""
        if frame.payload:
            raise BodyError("MEM_RESET takes no payload")
        ledger = self._ledger
        # After this wait nothing uses what ended connections hold.
        self._context.sync(self._resources.check_sync)
        before_bytes = ledger.used_bytes
        # In this order: ended connections, kept allocations, then what older clients left.
        for ended in self._ended:
            self._give_back_all(ended.holder)
        self._ended.clear()
        self._give_back_all(self._keeper.holder)
        # A connection of an older client may be attached: what has no holder may be its own.
        if not self.unheld_users:
            self._graphs.give_back(self.unheld)
            self._regions.give_back(self.unheld)
            self._give_back_all(self.unheld)
        self._regions.release_ended()
        self._record_usage()
        return done(frame, Freed(before_bytes - ledger.used_bytes))

    def _give_back_all(self, holder: Holder) -> None:
        for handle in self._ledger.allocations_of(holder):
            self._free(handle, self._check_lease)
        for number in self._ledger.modules_of(holder):
            self._unload(number, self._check_lease)
