"""The last messages of a worker: the zygote may report its end before the broker has read them."""

import contextlib
import select
import socket

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import channel_pair, send_message
from gpulease.daemon.leases.events import Event, SessionFaulted
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker

LEASE = 7

LARGER_BYTES = 1 << 20
"""A channel that holds more than one does that nobody has changed."""


def test_one_whose_channel_somebody_else_has_is_not_heard_for_ever() -> None:
    """A worker that was taken over can send its end to its tenant, who goes on saying things when it is long dead."""
    told: list[Event] = []
    workers, page = Workers("cpu"), BrokerPage()
    workers.deliver_to(told.append)
    ours, theirs = channel_pair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGER_BYTES)
        send_message(theirs, {"op": "faulted", "reason": "lost"})
        with contextlib.suppress(BlockingIOError):
            while True:
                send_message(theirs, {"op": "look"})
        spec = WorkerSpec(LEASE, "GPU-0", 1, is_shared=False)
        workers._read_last_messages(Worker(spec, page, ours, workers._zygotes.current, pid=1))
        assert select.select([ours], [], [], 0)[0], "there is more, which is not heard"
    page.close()
    assert told == [SessionFaulted(LEASE, "lost")]
