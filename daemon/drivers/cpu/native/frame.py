"""A thread's frame while it waits: what the thread, the block's loop and block.ll read and write.

In a kernel whose only waits are for barrier 0 a frame is `SHORT_HEAD_BYTES` with the place to go on at, then the
registers kept. In all others it is a `FrameHead`, the words the thread shows to its warp, those words again as they
were when its last exchange was complete, then the registers kept.
"""

import ctypes
from enum import IntEnum

SHORT_HEAD_BYTES = 8
SLOT_BYTES = 8

# Words a thread can show in one exchange.
MAX_SHOWN_WORDS = 32

# Named barriers of a block (PTX ISA section 9.7.13.1).
BARRIERS = 16


class State(IntEnum):
    """What a thread waits for; block.ll has these numbers too."""

    READY = 0
    YIELDED = 1
    AT_BARRIER = 2
    IN_EXCHANGE = 3
    IN_GATHERING = 4
    ENDED = -1


class FrameHead(ctypes.Structure):
    """What a waiting thread says of itself, and what it gets to know when it goes on.

    `kind` is the barrier's number, or what must be equal for threads to exchange; `members` the barrier's number of
    threads (0: all), or the member mask; `flag` the predicate contributed; `line` the PTX line; `place` the thread's
    indices, packed. Results: `group` is the lanes that exchanged, or the number of threads at the barrier; `ballot`
    those lanes whose flag is set, or their number.
    """

    _fields_ = (
        ("resume", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("kind", ctypes.c_uint32),
        ("members", ctypes.c_uint32),
        ("flag", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("ballot", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


HEAD_BYTES = ctypes.sizeof(FrameHead)
MAX_HEAD_BYTES = HEAD_BYTES + 2 * SLOT_BYTES * MAX_SHOWN_WORDS

# Before the first frame: how many threads have arrived at each barrier without waiting.
BOARD_BYTES = 4 * BARRIERS

# A thread's x, y and z in `place`: shifts; x and y are at most 1023, z at most 63.
PLACE_SHIFTS = (0, 10, 20)
PLACE_MASK = 1023
