"""Structures that Python fills and serve.ll reads; serve.ll has these offsets too. All addresses are this process's."""

import ctypes
from enum import IntEnum


class Outcome(IntEnum):
    """Why the ring's loop came back."""

    IDLE = 0
    FRAMES = 1
    TURN = 2
    WAKE_READER = 3
    WAKE_WRITER = 4


class Move(ctypes.Structure):
    """One argument's way from the wire's bytes to the parameter buffer."""

    _fields_ = (("start", ctypes.c_uint64), ("target", ctypes.c_uint64), ("size", ctypes.c_uint64))


class PlanRecord(ctypes.Structure):
    """A plan. `launch` is the driver's own record, 0 if only Python can launch it; `follower` is never 0."""

    _fields_ = (
        ("front", ctypes.c_uint64),
        ("middle", ctypes.c_uint64),
        ("middle_bytes", ctypes.c_uint64),
        ("tail", ctypes.c_uint64),
        ("tail_bytes", ctypes.c_uint64),
        ("args_bytes", ctypes.c_uint64),
        ("frame_bytes", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("moves", ctypes.c_uint64),
        ("moves_count", ctypes.c_uint64),
        ("param_bytes", ctypes.c_uint64),
        ("follower", ctypes.c_uint64),
    )


class ServingState(ctypes.Structure):
    """A session: its page, its driver's functions, what its SYNCs look like, and the buffer that is worked on.

    `expected` is the plan of the next launch, `latest` that of the last one done, both 0 for none; `clock_ns` is what
    the clock said when it was last asked.
    """

    _fields_ = (
        ("page", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("query", ctypes.c_uint64),
        ("driver", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
        ("sync_front", ctypes.c_uint64),
        ("sync_tail", ctypes.c_uint64),
        ("reply_front", ctypes.c_uint64),
        ("reply_tail", ctypes.c_uint64),
        ("sync_spin_ns", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("latest", ctypes.c_uint64),
        ("clock_ns", ctypes.c_uint64),
    )


class RingEnds(ctypes.Structure):
    """A connection's ring as its worker sees it: requests, then replies, then how long to look for more.

    `head`, `tail` and `reply_head` are this side's own, never read from the ring; `spins_left` is how often it may look
    for a while before it sleeps, which what comes sets to `spins_per_byte`, if that is not 0, and a reply to
    `spins_per_reply`.
    """

    _fields_ = (
        ("words", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        ("reply_words", ctypes.c_uint64),
        ("reply_data", ctypes.c_uint64),
        ("reply_capacity", ctypes.c_uint64),
        ("tail", ctypes.c_uint64),
        ("reply_head", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("spins_left", ctypes.c_uint64),
        ("spins_per_byte", ctypes.c_uint64),
        ("spins_per_reply", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("turn_ns", ctypes.c_uint64),
    )
