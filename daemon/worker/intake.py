"""Where a connection's bytes go: a frame reader, or, for the data of large writes, pinned memory.

A MEM_WRITE that is received into pinned memory is copied by the card from there, with no copy by the host but the
kernel's, and while the next one is received into the next slot. Slots are few, of one size, and a session's; a frame
for which there is none, or that is larger, goes through the reader as all others do.
"""

import mmap
from typing import Final

from gpulease.daemon.drivers.interface import Context, Ticket
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, parse_header
from gpulease.protocol.limits import DATA_CHUNK_BYTES
from gpulease.protocol.opcodes import Opcode

SLOTS: Final = 4
"""Of a session: one that is received into, one that the card copies, and as many in reserve. Bounds, with `SLOT_BYTES`,
what half-sent frames can hold of them."""

SLOT_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Room for the payload of a MEM_WRITE of the advised size."""

DIVERTED_FROM_BYTES: Final = 64 << 10
"""Payloads from this size on are received into a slot: below, the copy saved costs less than what is done for it."""

PREFIX_BYTES: Final = HEADER_BYTES + 20
"""Of a MEM_WRITE, what is not data."""

_MEM_WRITE: Final = int(Opcode.MEM_WRITE)


class Slot:
    """Pinned memory for one payload."""

    def __init__(self, context: Context) -> None:
        self.memory = mmap.mmap(-1, SLOT_BYTES)
        self.view = memoryview(self.memory)
        context.pin(self.view)
        self.ticket: Ticket | None = None
        self.is_held = False

    @property
    def is_free(self) -> bool:
        """Whether nobody fills it and the card is done with it."""
        return not self.is_held and (self.ticket is None or self.ticket.is_done())


class Slots:
    """A session's, made as they are needed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._slots: list[Slot] = []

    def take(self) -> Slot | None:
        """A free one, held from now on; None if there is none."""
        for slot in self._slots:
            if slot.is_free:
                break
        else:
            if len(self._slots) == SLOTS:
                return None
            slot = Slot(self._context)
            self._slots.append(slot)
        slot.ticket, slot.is_held = None, True
        return slot

    def close(self) -> None:
        """Give all back to the host; none is pinned any more."""
        for slot in self._slots:
            slot.view.release()
            slot.memory.close()
        self._slots.clear()

    def holding(self, data: memoryview) -> Slot | None:
        """The slot that these bytes lie in."""
        memory = data.obj
        for slot in self._slots:
            if slot.memory is memory:
                return slot
        return None


class Intake:
    """One connection's; used as a FrameReader is.

    Attributes:
        reader: Where all else goes.
    """

    def __init__(self, reader: FrameReader, slots: Slots) -> None:
        self.reader = reader
        self._slots = slots
        self._slot: Slot | None = None
        self._rest: memoryview | None = None
        self._header: tuple[int, int, int, int, int, bytes] = (0, 0, 0, 0, 0, b"")
        # The last frame was a large write, so another may follow.
        self._expects_more = False
        self._given: Slot | None = None

    @property
    def has_whole(self) -> bool:
        """Whether there is a frame that did not come through the reader."""
        return self._slot is not None and not self._rest

    @property
    def is_mid_frame(self) -> bool:
        """Whether part of a frame has arrived."""
        return self._slot is not None or self.reader.is_mid_frame

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty. Views of earlier frames are void from here on."""
        self._let_go()
        if self._rest:
            return self._rest
        room = self.reader.get_buffer()
        if self._expects_more:
            # Its header alone, so that its data need not be moved.
            missing = PREFIX_BYTES - (self.reader.end - self.reader.start)
            return room[:missing] if missing > 0 else room
        return room

    def buffer_updated(self, count: int) -> None:
        """`count` bytes were put into the last `get_buffer()`."""
        if self._rest:
            self._rest = self._rest[count:]
        else:
            self.reader.buffer_updated(count)

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more arrives. Raises FramingError; the intake is useless then."""
        self._let_go()
        if self._slot is not None:
            return None if self._rest else self._whole(self._slot)
        frame = self.reader.next_frame()
        if frame is None:
            self._divert()
        else:
            self._expects_more = False
        return frame

    def close(self) -> None:
        """Nothing more comes."""
        self._let_go()
        if self._slot is not None:
            self._slot.is_held = False
            self._slot = self._rest = None

    def _whole(self, slot: Slot) -> Frame:
        op, flags, status, length, request_id, session_id = self._header
        self._slot, self._rest, self._given = None, None, slot
        payload = slot.view[:length]
        return Frame(op, flags, status, request_id, int.from_bytes(session_id, "big"), payload)

    def _let_go(self) -> None:
        if self._given is not None:
            self._given.is_held = False
            self._given = None

    def _divert(self) -> None:
        """What has arrived is the beginning of a frame: have the rest of a large write go to a slot."""
        reader = self.reader
        if reader.end - reader.start < HEADER_BYTES:
            return
        header = parse_header(reader.buffer, reader.start)
        op, _, _, length, _, _ = header
        self._expects_more = is_large = op == _MEM_WRITE and DIVERTED_FROM_BYTES <= length <= SLOT_BYTES
        slot = self._slots.take() if is_large else None
        if slot is None:
            return
        begin = reader.start + HEADER_BYTES
        here = reader.end - begin
        slot.view[:here] = reader.view[begin : reader.end]
        reader.start = reader.end
        self._slot, self._rest, self._header = slot, slot.view[here:length], header
