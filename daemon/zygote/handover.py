"""How a zygote tells a broker that connects which workers it has, so that it can adopt them."""

import os
import socket
import struct
from typing import Any, Final

from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.version import BUILD, VERSION
from gpulease.daemon.zygote.worker_table import WorkerTable

HANDOVER: Final = 3
"""The form of what is told, and of what brokers and workers say to each other. One that differs can't be adopted."""

ZYGOTE_NAME: Final = "gpul-zygote"
"""For ps(1)."""

TELL_TIMEOUT_S: Final = 30.0
"""For a broker to take one message of it. Stops one that hangs from keeping leases from being ended."""

_UCRED: Final = struct.Struct("3i")


def admit(listener: socket.socket, *, is_taken: bool) -> socket.socket | None:
    """Who connects, if it may: root or the daemon's own user, and one at a time."""
    try:
        channel, _ = listener.accept()
    except OSError:
        return None
    _, uid, _ = _UCRED.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid in (0, os.geteuid()) and not is_taken:
        channel.settimeout(TELL_TIMEOUT_S)
        return channel
    try:
        if is_taken:
            channel.setblocking(False)
            send_message(channel, {"op": "taken"})
    except (ChannelClosed, BlockingIOError):
        pass
    channel.close()
    return None


def tell(channel: socket.socket, about: dict[str, Any], keeper: WorkerTable) -> None:
    """Tell everything, `about` this zygote first. Raises ChannelClosed if the broker does not take it."""
    own_pidfd = os.pidfd_open(os.getpid())
    try:
        known = {"op": "zygote", "version": VERSION, "build": BUILD, "handover": HANDOVER, "pid": os.getpid()}
        send_message(channel, known | about, (own_pidfd,))
    finally:
        os.close(own_pidfd)
    for kept in keeper.living():
        worker = {"op": "worker", "serial": kept.serial, "pid": kept.pid, "spec": kept.spec.to_message()}
        fds = (kept.pidfd, *kept.page_fds, kept.channel_fd)
        send_message(channel, worker | {"overran": kept.overran}, fds)
    for kept in keeper.ended():
        ended = {"op": "ended", "serial": kept.serial, "pid": kept.pid, "reason": kept.reason}
        said: dict[str, Any] = {"spec": kept.spec.to_message(), "overran": kept.overran}
        if (page := kept.last_page) is not None:
            said |= {"page": (page.word, page.deadline_ns, page.generation), "cause": page.cause}
        send_message(channel, ended | said)
    send_message(channel, {"op": "told"})
    channel.settimeout(None)
