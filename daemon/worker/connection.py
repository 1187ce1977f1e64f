"""One connection of a session as the worker has it: what it goes by, what came by it, what its peer has to read."""

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from gpulease.daemon.worker.backlog import Backlog
from gpulease.daemon.worker.guests import Guest
from gpulease.daemon.worker.intake import Intake, Slots
from gpulease.daemon.worker.native.layout import Outcome, RingEnds
from gpulease.daemon.worker.patience import Patience
from gpulease.daemon.worker.streams import Place
from gpulease.daemon.worker.wires import ConnectionLost, RingWire, SocketWire
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES

FRAME_TIMEOUT_S: Final = 60.0
"""From the last byte that came of a frame to the next. Stops a peer that keeps half a frame in the worker's memory;
one that is only slow never pauses for so long."""

ServeRing = Callable[[FrameReader, RingEnds], Outcome | None]
"""Has native code serve a ring, behind what its reader has; None if it can't now."""


class Connection:
    """One attached socket and what has arrived on it.

    Attributes:
        guest: Whose token it is bound to; None if it is the lease's own.
        wire: What its bytes go by: the socket, or a ring beside it.
        has_arena: Whether the session's arena is this connection's.
        place: Where its requests stand among the session's streams.
        spins_left: How often it is looked for more before the worker sleeps.
        heard_at_s: When something of a frame came that has not ended.
        backlog: What its peer has not read; None unless it is left aside for that.
        wait_ns: How long it is waited for when it does not read.
        distrusted_until_s: Until when it is not waited for at all; 0 if it is.
    """

    def __init__(
        self, sock: socket.socket, rest: bytes, slots: Slots, patience: Patience, guest: Guest | None = None
    ) -> None:
        self.sock = sock
        self.guest = guest
        self.fd = sock.fileno()
        self.wire: SocketWire | RingWire = SocketWire(sock, patience)
        self.reader = FrameReader(MAX_PAYLOAD_BYTES)
        self.reader.receive_data(rest)
        self.intake = Intake(self.reader, slots)
        self.has_arena = False
        self.place = Place()
        self.spins_left = patience.spins_per_reply
        self.heard_at_s = time.monotonic()
        self.backlog: Backlog | None = None
        self.wait_ns = 0
        self.distrusted_until_s = 0.0

    def overdue(self, now_s: float) -> ConnectionLost | FramingError | None:
        """Why it has to go, if it has kept something here for too long."""
        if self.backlog is not None:
            return ConnectionLost("the peer does not read") if self.backlog.is_stale(now_s) else None
        if self.intake.is_mid_frame and now_s - self.heard_at_s > FRAME_TIMEOUT_S:
            return FramingError(f"a frame did not go on within {FRAME_TIMEOUT_S:g} s")
        return None

    def serve_ring(self, serve: ServeRing) -> Outcome | None:
        """Let native code serve the ring, if there is one and nothing has been taken from it that is not served.

        Not a guest's: native code knows of no tokens. Raises ConnectionLost or FramingError.
        """
        wire = self.wire
        if self.guest is not None or self.intake.is_mid_frame or not isinstance(wire, RingWire):
            return None
        outcome, self.spins_left = wire.serve(partial(serve, self.reader), self.spins_left)
        return outcome

    def receive(self) -> bool:
        """Take what has come; False if there is nothing, and no use in looking again at once.

        Raises ConnectionLost or FramingError.
        """
        wire, intake = self.wire, self.intake
        if not wire.receive(intake):
            if not self.spins_left:
                return False
            self.spins_left -= 1
            if not wire.spin(intake):
                return False
        if wire.spins_when_quiet:
            self.spins_left = 1
        return True
