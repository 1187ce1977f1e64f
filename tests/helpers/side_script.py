"""`python -m helpers.side_script CHANNEL_FD PARENT_PID WAY`: a helper process of the broker, honest or not.

`serves` is the honest one: it reports that it is ready, and answers each liveness question; each of the others fails in
one thing.
"""

import socket
import sys
import time
from typing import NoReturn

from gpulease.daemon.host.ipc import ChannelClosed, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent


def serve(channel: socket.socket) -> None:
    """Serve until asked to exit, or until the broker is gone."""
    while True:
        try:
            message, _ = receive_message(channel)
        except ChannelClosed:
            return
        match message:
            case {"op": "ping"}:
                send_message(channel, {"op": "pong"})
            case {"op": "die", "status": int(status)}:
                sys.exit(status)
            case _:
                send_message(channel, {"op": "heard", "message": message})


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def go(way: str, channel: socket.socket) -> None:
    if way == "dies":
        sys.exit(3)
    if way == "breaks":
        send_message(channel, {"op": "broken", "reason": "there is no paper"})
        return
    if way != "is not ready":
        send_message(channel, {"op": "ready"})
    match way:
        case "serves":
            serve(channel)
        case "closes its channel":
            channel.close()
        case "makes no sense":
            channel.send(b"\xc1")
    hang()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    go(sys.argv[3], socket.socket(fileno=int(sys.argv[1])))
