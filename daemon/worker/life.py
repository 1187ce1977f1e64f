"""A worker from its birth in the zygote to its end: open the context, say so, serve, and leave."""

import contextlib
import os
import signal
import socket
import sys
import traceback

from gpulease.daemon.channel import ChannelClosed, send_message
from gpulease.daemon.drivers.interface import Driver, DriverError
from gpulease.daemon.processes import die_with_parent, gain_no_privileges, set_name
from gpulease.daemon.worker.exits import WorkerExit
from gpulease.daemon.worker.ledger import Ledger
from gpulease.daemon.worker.page import WorkerPage
from gpulease.daemon.worker.patience import patience_of
from gpulease.daemon.worker.serving import Server
from gpulease.daemon.worker.session import Session
from gpulease.daemon.worker.spec import WorkerSpec
from gpulease.protocol.messages import AttachReply


def live(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fd: int, zygote_pid: int) -> WorkerExit:
    """Be the worker of one lease, in a process just forked; returns how to exit."""
    try:
        die_with_parent(zygote_pid)
        gain_no_privileges()
        set_name(f"gpul-{spec.lease_id:032x}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        page = WorkerPage(page_fd)
        os.close(page_fd)
        return _serve(spec, driver, channel, page)
    except Exception:
        # A bug of ours: the log gets the traceback, the tenant a lost session, the broker an exit status.
        traceback.print_exc(file=sys.stderr)
        return WorkerExit.BUG


def _serve(spec: WorkerSpec, driver: Driver, channel: socket.socket, page: WorkerPage) -> WorkerExit:
    try:
        context = driver.open_context(spec.card_uuid, spec.size_bytes)
    except DriverError as error:
        _tell(channel, {"op": "failed", "reason": str(error)})
        return WorkerExit.NO_CONTEXT
    patience = patience_of(spec.waiting)
    context.be_patient(spins=patience.spins_at_all, yields=patience.yields)
    _tell(channel, {"op": "ready"})
    ledger = Ledger(spec.size_bytes, spec.allowance_bytes, context.page_bytes)
    session = Session(spec.lease_id, context, ledger, page, spec.max_kernel_ms, context.native())
    welcome = AttachReply(spec.size_bytes, driver.name, spec.card_uuid, ())
    Server(channel, session, welcome, is_shared=spec.is_shared, patience=patience).run()
    return WorkerExit.OK


def _tell(channel: socket.socket, message: dict[str, str]) -> None:
    # If the broker is gone, the loop will see it too, and leave.
    with contextlib.suppress(ChannelClosed):
        send_message(channel, message)
