"""A worker from its fork in the zygote to its exit: open the context, report that, serve, exit.

A warm worker has no lease at first: it opens its context, runs the warm-up, and waits until the broker gives it a
lease. Once it is scrubbed, it may serve another lease.
"""

import contextlib
import gc
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from gpulease.daemon.contract.control_page import Counter, PageFds, WorkerPage
from gpulease.daemon.contract.message_fields import Message, parse_message
from gpulease.daemon.contract.messages import TO_WORKER, Failed, Faulted, Ready, Scrubbed
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.drivers.interface import Context, Driver, DriverError, Opening
from gpulease.daemon.host.captured_output import CapturedOutput
from gpulease.daemon.host.heap_wipe import is_heap_wiped
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.processes import set_name
from gpulease.daemon.session.connection import spin_policy_of
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.operations import LeaseOver
from gpulease.daemon.session.rehearsal import SLICE_BYTES, RehearsalFailed, rehearse
from gpulease.daemon.session.server import MAX_SLEEP_MS, SessionServer, SubmitServer
from gpulease.daemon.session.session import Session
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import SubmitOption
from gpulease.protocol.primitives import Tlv

WARM_NAME = "gpul-warm"
"""Name that ps(1) shows for a worker without a lease."""

SUBMIT_NAME = "gpul-submit"

HOLD_SPIN_NS: Final = 1_000_000
"""Time for which native code spins while launches are held back until another session's turn ends or the queue is
shorter, which often takes only microseconds. After that time the worker's loop serves the broker."""


@dataclass(frozen=True, slots=True)
class _Scrubbed:
    """The state of a worker after a lease that left nothing behind.

    Attributes:
        page_fds: The control pages of the next lease.
        opening: Opens the context again, once the size of the next lease's slice is known.
        held_bytes: Bytes that the ended session's ledger still counted.
    """

    page_fds: PageFds
    opening: Opening
    held_bytes: int


def run_lease_worker(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
    """Run as the worker of one lease, in a newly forked and sandboxed process. Returns how to exit."""

    def serve(page: WorkerPage, output: CapturedOutput) -> WorkerExit:
        served = _serve(
            spec, driver, channel, page, output, lambda: driver.open_context(spec.card_uuid, spec.context_bytes)
        )
        return served if isinstance(served, WorkerExit) else WorkerExit.OK

    return _run(serve, channel, page_fds)


def run_warm_worker(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
    """Run as a warm worker, then as the worker of one lease after another, in a newly forked process.

    Returns how to exit.
    """

    def wait_and_serve(page: WorkerPage, output: CapturedOutput) -> WorkerExit:
        set_name(WARM_NAME)
        try:
            # The first context and the warm-up do everything that is slow the first time. Then `rewind` keeps only the
            # parts that the next context needs.
            context = driver.open_context(spec.card_uuid, SLICE_BYTES)
            rehearse(context)
            opening = driver.rewind(context)
        except (DriverError, RehearsalFailed) as error:
            _report(channel, Failed(str(error)))
            return WorkerExit.NO_CONTEXT
        page.counters[Counter.LAST_POLL_NS] = time.monotonic_ns()
        _report(channel, Ready())
        return _serve_leases(spec, driver, channel, page, output, opening)

    return _run(wait_and_serve, channel, page_fds)


def _serve_leases(
    spec: WorkerSpec, driver: Driver, channel: socket.socket, page: WorkerPage, output: CapturedOutput, opening: Opening
) -> WorkerExit:
    """Wait for a lease and serve it; repeat as long as no lease leaves anything behind."""
    while True:
        # State 1: wait for a lease.
        lease = _await_lease(channel, page)
        if lease is None:
            return WorkerExit.OK
        if lease.card_uuid != spec.card_uuid:
            raise ValueError(f"the lease is on {lease.card_uuid}, but this context is on {spec.card_uuid}")
        # State 2: serve the lease, until its session ends.
        served = _serve(lease, driver, channel, page, output, partial(opening, lease.context_bytes))
        if isinstance(served, WorkerExit):
            return served
        # State 3: scrubbed. Use new control pages and a new opening, and remove the lease from the process's name.
        set_name(WARM_NAME)
        page.close()
        page, opening = WorkerPage(served.page_fds), served.opening
        close_all([*served.page_fds])
        # The heap overwrites freed memory. The lease's objects form cycles, so only the collector frees them.
        gc.collect()
        page.counters[Counter.LAST_POLL_NS] = time.monotonic_ns()
        _report(channel, Scrubbed("", served.held_bytes))


def _run(
    serve: Callable[[WorkerPage, CapturedOutput], WorkerExit], channel: socket.socket, page_fds: PageFds
) -> WorkerExit:
    try:
        # SIGTERM must end a worker, even if the zygote handles it otherwise.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            page, output = WorkerPage(page_fds), CapturedOutput()
        except OSError as error:
            # The host has no memory to map the pages.
            _report(channel, Failed(str(error)))
            return WorkerExit.NO_CONTEXT
        # The pages are mapped now, so their descriptors are not needed.
        close_all([*page_fds])
        return serve(page, output)
    except Exception:
        # This is a bug of ours: write the traceback to the log. The tenant gets the error of a lost session, the broker
        # an exit status.
        traceback.print_exc(file=sys.stderr)
        return WorkerExit.BUG


def _await_lease(channel: socket.socket, page: WorkerPage) -> WorkerSpec | None:
    """Wait, with heartbeats, until the broker gives this worker a lease; return None if the broker is gone."""
    channel.setblocking(False)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        # Update the heartbeat: without it the broker kills a warm worker.
        page.counters[Counter.LAST_POLL_NS] = time.monotonic_ns()
        if not poll.poll(MAX_SLEEP_MS):
            continue
        try:
            message, fds = receive_message(channel)
        except ChannelClosed:
            return None
        close_all(fds)
        # Any other message means that the lease that this worker was to serve has ended: the broker will kill this
        # process.
        if isinstance(spec := parse_message(TO_WORKER, message), WorkerSpec):
            return spec


def _serve(
    spec: WorkerSpec,
    driver: Driver,
    channel: socket.socket,
    page: WorkerPage,
    output: CapturedOutput,
    open_context: Callable[[], Context],
) -> WorkerExit | _Scrubbed:
    # Drop the output of an earlier lease: its kernels may have printed until its context ended.
    output.take()
    is_parkable = spec.is_parkable and not spec.submit_of
    try:
        context = open_context()
        # Do this before the first allocation and before the lease's time begins, because it fails on a card that does
        # not support it.
        if is_parkable:
            context.make_parkable(spec.context_bytes)
    except DriverError as error:
        _report(channel, Failed(str(error)))
        return WorkerExit.NO_CONTEXT
    set_name(SUBMIT_NAME if spec.submit_of else f"gpul-{spec.lease_id:032x}")
    spin_policy = spin_policy_of(spec.waiting)
    context.set_spinning(spins=spin_policy.spins_at_all, yields=spin_policy.yields)
    # Report Ready first, which starts the lease's time: the rest takes only microseconds.
    _report(channel, Ready())
    # Make the session's ledger and resources, the reply that greets a client, and the server that runs the session.
    ledger = Ledger(spec.size_bytes, spec.allowance_bytes, context.page_bytes)
    welcome = AttachReply(spec.size_bytes, driver.name, spec.card_uuid, ())
    try:
        # A one-shot job has a server of its own kind: it reads the job, runs it, and exits.
        if spec.submit_of:
            number = Tlv(SubmitOption.NUMBER, spec.submit_number.to_bytes(8, "big"))
            welcome = replace(welcome, options=(number, Tlv(SubmitOption.TYPED_VALUES, b"")))
            session = Session(spec.submit_of, context, ledger, page, spec, is_submit=True)
            SubmitServer(channel, session, welcome).run()
            return WorkerExit.OK
        session = Session(
            spec.lease_id,
            context,
            ledger,
            page,
            spec,
            context.native(),
            is_parkable=is_parkable,
            hold_spin_ns=HOLD_SPIN_NS if spin_policy.spins_when_quiet and not spin_policy.yields else 0,
            take_printed=output.take,
        )
        server = SessionServer(channel, session, welcome, is_shared=spec.is_shared, spin_policy=spin_policy)
        server.run()
    except MemoryError:
        # The failed operation's memory is free again, but the session may be in an incomplete state, so it must end.
        _report(channel, Faulted("the host had no memory left for its process"))
        return WorkerExit.NO_MEMORY
    # The session has ended. Scrub this process, or report why that failed.
    if server.next_pages is None:
        return WorkerExit.OK
    try:
        opening = scrub(session, context, driver)
    except NotScrubbed as error:
        _report(channel, Scrubbed(str(error), ledger.used_bytes))
        return WorkerExit.OK
    return _Scrubbed(server.next_pages, opening, ledger.used_bytes)


def _report(channel: socket.socket, message: Message) -> None:
    # Ignore the error: if the broker is gone, the loop notices and exits, or the next broker reads the message.
    with contextlib.suppress(ChannelClosed, BlockingIOError):
        send_message(channel, message.to_map())


# --- the scrub ---
# After a freed lease, release and overwrite everything that it left, so that this process may serve another lease. The
# attempt fails if something can't be undone: a fault, a kernel that keeps running, memory that the driver keeps for
# good, a module with variables, memory that still has a view. Then the broker kills the worker, as after any other
# lease.

BUSY_S: Final = 0.1
"""Time for which kernels may still run. The tenant has freed the lease, so usually no kernel runs."""

_STDERR: Final = 2


class NotScrubbed(Exception):
    """Something of the lease is left, or may be left. The message says what."""


def scrub(session: Session, context: Context, driver: Driver) -> Opening:
    """Remove everything of a session; return the opening with which to open a context again. Raises NotScrubbed."""
    # First check the two conditions without which a scrub would be worthless.
    if not is_heap_wiped():
        raise NotScrubbed("this process does not overwrite the memory that it frees")
    if not _has_log_reader():
        raise NotScrubbed(
            "it has written more output than is logged of one process, so the next lease's output would be lost"
        )
    # Release in this order: objects of the context, the context itself (which unpins host memory), then that memory.
    try:
        session.release(_until(time.monotonic() + BUSY_S))
        opening = driver.recycle(context)
        session.release_memory()
    except (DriverError, LeaseOver, BufferError) as error:
        raise NotScrubbed(str(error) or type(error).__name__) from None
    return opening


def _has_log_reader() -> bool:
    """Return whether a process reads this one's stderr.

    Source: pipe(7); poll(2) reports POLLERR for a pipe without a reader.
    """
    # No events requested: POLLERR is always reported.
    poll = select.poll()
    poll.register(_STDERR, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _until(end_s: float) -> Callable[[], None]:
    def poll() -> None:
        if time.monotonic() > end_s:
            raise DriverError(f"work that it launched has not ended after {BUSY_S:g} s")

    return poll
