"""A worker from its birth in the zygote to its end: open the context, say so, serve, and leave.

One that is made ahead has no lease at first: it opens its context, rehearses, and waits to be told of one. It may serve
another one behind it, once it is scrubbed.
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
from dataclasses import dataclass, replace
from functools import partial

from gpulease.daemon.contract.control_page import Counter, PageFds, WorkerPage
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import TO_WORKER, Failed, Faulted, Ready, Scrubbed, parse_message
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.drivers.interface import Context, Driver, DriverError, Opening
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.processes import set_name
from gpulease.daemon.session.connection import spin_policy_of
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.rehearsal import SLICE_BYTES, RehearsalFailed, rehearse
from gpulease.daemon.session.scrub import NotScrubbed, scrub
from gpulease.daemon.session.server import LOOK_MS, OnceServer, Server
from gpulease.daemon.session.session import Session
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import SubmitOption
from gpulease.protocol.primitives import Tlv

WARM_NAME = "gpul-warm"
"""Of a worker without a lease, for ps(1)."""

SUBMIT_NAME = "gpul-submit"
"""Of a submit's."""


@dataclass(frozen=True, slots=True)
class _Scrubbed:
    """What a worker goes on with after a lease that left nothing: its next control pages and the rest of its context.

    `held_bytes` is what its own books say that it still has.
    """

    page_fds: PageFds
    opening: Opening
    held_bytes: int


def live(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
    """Be the worker of one lease, in a process just forked and shut in; returns how to exit."""

    def serve(page: WorkerPage) -> WorkerExit:
        served = _serve(spec, driver, channel, page, lambda: driver.open_context(spec.card_uuid, spec.size_bytes))
        return served if isinstance(served, WorkerExit) else WorkerExit.OK

    return _begin(serve, page_fds)


def stand_by(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
    """Be a worker without a lease, and then that of one lease, in a process just forked; returns how to exit."""

    def wait_and_serve(page: WorkerPage) -> WorkerExit:
        set_name(WARM_NAME)
        try:
            context = driver.open_context(spec.card_uuid, SLICE_BYTES)
            rehearse(context)
            opening = driver.rewind(context)
        except (DriverError, RehearsalFailed) as error:
            _tell(channel, Failed(str(error)))
            return WorkerExit.NO_CONTEXT
        page.counters[Counter.LOOKED_NS] = time.monotonic_ns()
        _tell(channel, Ready())
        return _serve_leases(spec, driver, channel, page, opening)

    return _begin(wait_and_serve, page_fds)


def _serve_leases(
    spec: WorkerSpec, driver: Driver, channel: socket.socket, page: WorkerPage, opening: Opening
) -> WorkerExit:
    """Wait for a lease and be its worker; and for another, if nothing of that one is left."""
    while True:
        lease = _await_lease(channel, page)
        if lease is None:
            return WorkerExit.OK
        if lease.card_uuid != spec.card_uuid:
            raise ValueError(f"a lease on {lease.card_uuid} for a context on {spec.card_uuid}")
        served = _serve(lease, driver, channel, page, partial(opening, lease.size_bytes))
        if isinstance(served, WorkerExit):
            return served
        set_name(WARM_NAME)
        page.close()
        page, opening = WorkerPage(served.page_fds), served.opening
        close_all([*served.page_fds])
        # What the lease's objects held is overwritten as they go, and they are cycles.
        gc.collect()
        page.counters[Counter.LOOKED_NS] = time.monotonic_ns()
        _tell(channel, Scrubbed("", served.held_bytes))


def _begin(serve: Callable[[WorkerPage], WorkerExit], page_fds: PageFds) -> WorkerExit:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        page = WorkerPage(page_fds)
        close_all([*page_fds])
        return serve(page)
    except Exception:
        # A bug of ours: the log gets the traceback, the tenant a lost session, the broker an exit status.
        traceback.print_exc(file=sys.stderr)
        return WorkerExit.BUG


def _await_lease(channel: socket.socket, page: WorkerPage) -> WorkerSpec | None:
    """Show that this process goes round until it is told of its lease; None if the broker is gone."""
    channel.setblocking(False)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        page.counters[Counter.LOOKED_NS] = time.monotonic_ns()
        if not poll.poll(LOOK_MS):
            continue
        try:
            message, fds = receive_message(channel)
        except ChannelClosed:
            return None
        close_all(fds)
        # Otherwise the lease that this worker was to take is over, and the broker will kill it.
        if isinstance(spec := parse_message(TO_WORKER, message), WorkerSpec):
            return spec


def _serve(
    spec: WorkerSpec, driver: Driver, channel: socket.socket, page: WorkerPage, open_context: Callable[[], Context]
) -> WorkerExit | _Scrubbed:
    try:
        context = open_context()
    except DriverError as error:
        _tell(channel, Failed(str(error)))
        return WorkerExit.NO_CONTEXT
    set_name(SUBMIT_NAME if spec.submit_of else f"gpul-{spec.lease_id:032x}")
    patience = spin_policy_of(spec.waiting)
    context.be_patient(spins=patience.spins_at_all, yields=patience.yields)
    _tell(channel, Ready())
    ledger = Ledger(spec.size_bytes, spec.allowance_bytes, context.page_bytes)
    welcome = AttachReply(spec.size_bytes, driver.name, spec.card_uuid, ())
    try:
        if spec.submit_of:
            number = Tlv(SubmitOption.NUMBER, spec.submit_number.to_bytes(8, "big"))
            welcome = replace(welcome, options=(number, Tlv(SubmitOption.TYPED_VALUES, b"")))
            session = Session(spec.submit_of, context, ledger, page, spec.max_kernel_ms, is_submit=True)
            OnceServer(channel, session, welcome).run()
            return WorkerExit.OK
        session = Session(spec.lease_id, context, ledger, page, spec.max_kernel_ms, context.native())
        server = Server(channel, session, welcome, is_shared=spec.is_shared, patience=patience)
        server.run()
    except MemoryError:
        # What the operation was about is let go by now. Whether the session is whole, nobody knows.
        _tell(channel, Faulted("its process found no memory on this host"))
        return WorkerExit.NO_MEMORY
    if server.next_pages is None:
        return WorkerExit.OK
    try:
        opening = scrub(session, context, driver)
    except NotScrubbed as error:
        _tell(channel, Scrubbed(str(error), ledger.used_bytes))
        return WorkerExit.OK
    return _Scrubbed(server.next_pages, opening, ledger.used_bytes)


def _tell(channel: socket.socket, message: Message) -> None:
    # If the broker is gone, the loop will see it too, and leave; or the next one will read it.
    with contextlib.suppress(ChannelClosed, BlockingIOError):
        send_message(channel, message.to_map())
