"""`python -m helpers.side_script CHANNEL_FD PARENT_PID WAY`: a helper process of the broker, correct or faulty.

With WAY `serves` it is correct: it reports that it is ready, and replies to each liveness check. With each other WAY it
has one fault.
"""

import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

from gpulease.daemon.contract.message_fields import Message, Pid, Request, Text, expect_message, messages_of
from gpulease.daemon.contract.messages import HelperBroken, LivenessPing, Pong, Ready
from gpulease.daemon.host.ipc import ChannelClosed, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent


@dataclass(frozen=True, slots=True)
class Die(Message):
    """To the script: exit with this status."""

    OP: ClassVar[str] = "die"
    status: Pid


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """To the script: answer with the same message."""

    OP: ClassVar[str] = "say"
    text: Text
    request: Request = 0


@dataclass(frozen=True, slots=True)
class Talk(Message):
    """To the script: send messages that no correct helper sends."""

    OP: ClassVar[str] = "talk"


FOREIGN: Final[tuple[dict[str, Any], ...]] = (
    {"op": "tomorrow's"},
    {"op": "say", "text": 5, "number": 11},
    {"op": "say", "number": 12},
    {"op": ["say"], "number": 13},
    {"number": -1},
)
"""The messages that the script sends on Talk."""

TO_SCRIPT = messages_of(LivenessPing | Die | Progress | Talk)


def serve(channel: socket.socket) -> None:
    """Serve until a message orders the exit, or the broker is gone."""
    while True:
        try:
            message = expect_message(TO_SCRIPT, receive_message(channel)[0])
        except ChannelClosed:
            return
        match message:
            case LivenessPing():
                send_message(channel, Pong().to_map())
            case Die():
                sys.exit(message.status)
            case Progress():
                send_message(channel, message.to_map())
            case Talk():
                for foreign in FOREIGN:
                    send_message(channel, foreign)


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def go(way: str, channel: socket.socket) -> None:
    if way == "dies":
        sys.exit(3)
    if way == "breaks":
        send_message(channel, HelperBroken("there is no paper").to_map())
        return
    if way != "is not ready":
        send_message(channel, Ready().to_map())
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
