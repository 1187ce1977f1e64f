"""Releases the objects that connections have made, after the connections have ended.

A connection owns the allocations, modules, graphs and region sets that it makes. When it ends, its graphs and sets are
released at once. Its allocations and modules are released when the work that it had queued has ended, because its
kernels may use them. A request waits for that work, for a bounded time, only if it needs the memory that they take. An
endless kernel keeps them until the lease ends, or until the kernel exceeds the lease's maximum run time; until then
they count as used.

A client of an earlier version does not request this release: the objects of its connection have no holder, and stay
until MEM_RESET or the lease's end. Allocations that are kept by name also stay, because the lease holds them.
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
from gpulease.daemon.session.operations import OperationHandler, SessionResources, StillRuns, do_not_wait, serves
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
"""Maximum number of objects that are released before the other connections are served again. It keeps a connection that
ends with 65,536 allocations from delaying the others until all of these are freed."""

FIRST_PAUSE_S: Final = 0.001
LAST_PAUSE_S: Final = 0.128
"""Pauses between polls of an ended connection's running work: from FIRST_PAUSE_S to LAST_PAUSE_S, doubled each time.
Without them, an endless kernel of an ended connection would keep one core of the worker busy."""

ALONE_WAIT_S: Final = 10.0
"""Longest time that a request that lacks room waits for ended connections' kernels, if no other connection is
attached."""

SHARED_WAIT_S: Final = 0.1
"""ALONE_WAIT_S if other connections are attached, which are not served during the wait."""

WAIT_STEP_S: Final = 0.001


@dataclass(slots=True, eq=False)
class _Ended:
    """An ended connection that still holds objects.

    Attributes:
        waits: Tickets of the work that has to end before any of its objects is released.
        modules: The numbers of its modules; some may be unloaded already.
        allocations: The handles of its allocations; some may be freed already.
    """

    holder: Holder
    waits: list[Ticket]
    modules: list[int]
    allocations: list[int]


class EndedConnections(OperationHandler):
    """Releases what ended connections hold.

    Args:
        parts: The handlers of a session's kept allocations, modules, graphs and regions.
        planner: The session's launch plans. None may launch a kernel of a module that is being unloaded.

    Attributes:
        unheld: The holder of objects of older clients, which do not end with their connection.
        unheld_users: Number of attached connections of such clients.
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
        self._idle_polls = 0
        self._next_poll_s = 0.0

    def end(self, holder: Holder, streams: Iterable[int]) -> None:
        """Release what an ended connection holds, once the work that is queued on its streams now has ended.

        Args:
            holder: The connection's holder.
            streams: The driver's numbers of its streams; they are destroyed after this call.
        """
        # Release graphs and region sets at once: replays that were queued still run to their end, and sets are only
        # lists.
        self._graphs.give_back(holder)
        self._regions.give_back(holder)
        holder.show_at(Counter.UNHELD_BYTES)
        modules, allocations = self._ledger.modules_of(holder), self._ledger.allocations_of(holder)
        if modules or allocations:
            waits: list[Ticket] = []
            # If a stream can't be marked, the release itself waits for the work, or finds that the context is lost.
            with suppress(DriverError):
                waits += [
                    self._resources.call_outside_request(partial(self._context.mark, stream)) for stream in streams
                ]
            self._ended.append(_Ended(holder, waits, modules, allocations))
            self._idle_polls, self._next_poll_s = 0, 0.0
            self.advance()

    # --- the worker's loop ---

    def sleep_ms(self) -> int | None:
        """Return for how many milliseconds the worker's loop may sleep; None if there is nothing to release."""
        if not self._ended or self._resources.is_parked:
            return None
        return max(0, math.ceil((self._next_poll_s - time.monotonic()) * 1000))

    def advance(self, *, now: bool = False) -> None:
        """Release what can be released without a wait, if a poll is due or `now` is set.

        Does nothing on a parked session.
        """
        if not self._ended or self._resources.is_parked or (not now and time.monotonic() < self._next_poll_s):
            return
        # After a success poll again at once, as more may be free. Otherwise back off, so that an endless kernel costs
        # no core.
        if self._give_back():
            self._idle_polls, self._next_poll_s = 0, 0.0
        else:
            self._next_poll_s = time.monotonic() + back_off_s(self._idle_polls, FIRST_PAUSE_S, LAST_PAUSE_S)
            self._idle_polls += 1

    def _give_back(self) -> bool:
        """Release some objects that no kernel uses any more, without waiting; return whether there were any."""
        frees_left = FREES_PER_TURN
        # Check each ended connection separately: if a kernel of one is still running, this must not delay the release
        # of the others' memory.
        for ended in list(self._ended):
            # Drop the tickets that are done: they need not be polled again.
            ended.waits = [ticket for ticket in ended.waits if not ticket.is_done()]
            if ended.waits:
                continue
            # Release allocations and modules one by one, without a wait inside the driver.
            try:
                while frees_left and (ended.allocations or ended.modules):
                    self._give_back_one(ended)
                    frees_left -= 1
            except StillRuns:
                continue
            except KernelFault as fault:
                # Keep the fault. If an earlier one is kept already, that one is reported first.
                self._resources.keep_fault(fault)
                if fault.context_lost:
                    self._ended.remove(ended)
                continue
            except DriverError:
                # The objects are lost with the context, or the driver never frees them: they count as used until the
                # lease ends.
                self._ended.remove(ended)
                continue
            # All objects of this connection are released.
            if frees_left:
                self._ended.remove(ended)
        if frees_left != FREES_PER_TURN:
            self._record_usage()
        return frees_left != FREES_PER_TURN

    def _give_back_one(self, ended: _Ended) -> None:
        if ended.allocations:
            handle = ended.allocations[-1]
            # Another connection may have freed it or taken it over in the meantime.
            if self._ledger.holder_of(handle) is ended.holder:
                self._free(handle, do_not_wait)
            ended.allocations.pop()
            return
        # Another connection may have unloaded it.
        if self._ledger.has_module(ended.modules[-1]):
            self._unload(ended.modules[-1], do_not_wait)
        ended.modules.pop()

    def _free(self, handle: int, poll: Poll) -> None:
        self._resources.call_outside_request(lambda: self._context.mem_free(handle, poll))
        self._ledger.remove_allocation(handle)

    def _unload(self, number: int, poll: Poll) -> None:
        # The plans must not launch its kernels any more.
        self._planner.forget()
        self._resources.call_outside_request(lambda: self._modules.give_back(number, poll))

    @property
    def has_any(self) -> bool:
        """Return whether an ended connection holds something."""
        return bool(self._ended)

    # --- requests that need room ---

    def may_make_room(self, failure: Failure) -> bool:
        """Return whether a request failed for lack of room while ended connections still take some."""
        match failure.status:
            case Status.ALLOC_FAILED:
                return any(ended.holder.held_bytes for ended in self._ended)
            case Status.LOAD_FAILED:
                return any(ended.modules for ended in self._ended)
        return False

    def make_room(self, *, is_alone: bool) -> bool:
        """Release what ended connections hold, waiting for running work if necessary.

        Args:
            is_alone: Whether no other connection is attached, which would have to wait as well.

        Returns whether anything was released. Raises LeaseOver.
        """
        # If no other connection is attached, a long wait harms nobody; otherwise it delays all others.
        until_s = time.monotonic() + (ALONE_WAIT_S if is_alone else SHARED_WAIT_S)
        has_given = False
        while self._ended:
            if self._give_back():
                has_given = True
            elif time.monotonic() > until_s:
                break
            else:
                # Sleep here and not inside the driver, so that regions can open and end during the wait.
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
            message=f"{failure.message}; connections that have ended still hold {held_bytes} bytes, until their "
            "kernels end",
            hint="Wait for those kernels. An endless kernel ends with its lease, or earlier if the lease has "
            "max_kernel_secs.",
        )

    @serves(Opcode.MEM_RESET)
    def reset(self, frame: Frame) -> bytes:
        """Serve MEM_RESET: wait as SYNC does, then release everything that no attached connection holds."""
        if frame.payload:
            raise BodyError("MEM_RESET takes no payload")
        ledger = self._ledger
        # After this wait no work uses what ended connections hold.
        self._context.sync(self._resources.check_sync)
        before_bytes = ledger.used_bytes
        # Release, in this order: what ended connections hold, kept allocations, then what older clients left.
        for ended in self._ended:
            self._give_back_all(ended.holder)
        self._ended.clear()
        self._give_back_all(self._keeper.holder)
        # While a connection of an older client is attached, objects without a holder may be in use by it.
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
