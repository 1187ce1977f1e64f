"""Events of the embedded driver: a built-in kernel, queued like any other, writes the time.

One array of device memory holds all stamps. The queue keeps its order, so a slot may be reused before a forgotten
event's stamp is written, because the new stamp is written later.
"""

from typing import Final

from gpulease.daemon.drivers.interface import Ticket
from gpulease.protocol.limits import MAX_EVENTS

STAMP: Final = b"""
.version 7.0
.target sm_50
.address_size 64
.visible .entry stamp(.param .u64 at)
{
.reg .b64 %at, %now;
ld.param.u64 %at, [at]; mov.u64 %now, %globaltimer; st.global.u64 [%at], %now;
ret;
}
"""

STAMP_BYTES: Final = 8
"""Bytes of a stamp: nanoseconds since 1970."""

ALL_STAMPS_BYTES: Final = MAX_EVENTS * STAMP_BYTES


class StampedEvent:
    """An event. Its slot is free again when nothing refers to the event.

    Attributes:
        address: Device address of its stamp.
    """

    def __init__(self, slots: list[int], ticket: Ticket, address: int) -> None:
        self._slots, self._ticket = slots, ticket
        self.address = address

    def is_done(self) -> bool:
        """Return whether the stamp was written, or skipped because of a fault."""
        return self._ticket.is_done()

    def __del__(self) -> None:
        self._slots.append(self.address)
