"""Structures that Python and generated code share. Generated code uses the fields' offsets.

A waiting thread keeps a frame. In a kernel that waits only at barrier 0, the frame is a head of `SHORT_HEAD_BYTES` with
the place where the thread resumes, and then the saved registers. In all other kernels the frame is a `FrameHead`, the
words that the thread shows to its warp, the words from its last complete exchange, and then the saved registers.
"""

import ctypes
import struct
from enum import IntEnum

SHORT_HEAD_BYTES = 8
SLOT_BYTES = 8

# Maximum number of words that a thread can show in one exchange.
MAX_SHOWN_WORDS = 32

# Number of named barriers of a block (PTX ISA section 9.7.13.1).
BARRIERS = 16


class ThreadState(IntEnum):
    """States of a thread. block.ll has the same numbers."""

    READY = 0
    YIELDED = 1
    AT_BARRIER = 2
    IN_EXCHANGE = 3
    IN_GATHERING = 4
    ENDED = -1


class FrameHead(ctypes.Structure):
    """The head of a waiting thread's frame: the thread's request, and the results that it reads when it resumes.

    A request waits at a barrier or exchanges words with other threads of the warp.

    `kind` is the barrier's number, or a value that must be equal for threads to exchange. `members` is the barrier's
    number of threads, or 0 for all, or the member mask of the exchange. `flag` is the thread's predicate, `line` the
    PTX line, and `place` the thread's packed indices.

    Of the results, `group` is the number of threads at the barrier, or the lanes that exchanged. `ballot` is the number
    of these threads with the flag set, or their lanes.
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

# Bytes before the first frame: for each barrier, the number of threads that have arrived without waiting.
BOARD_BYTES = 4 * BARRIERS

# The shifts of a thread's x, y and z in `place`; x and y are at most 1023, z at most 63.
PLACE_SHIFTS = (0, 10, 20)
PLACE_MASK = 1023


class ReturnStatus(IntEnum):
    """Return values of the function of a thread or a kernel."""

    DONE = 0
    WAITS = 1
    FAULT = 2
    # Only device functions return these: the thread has ended in the function, or the called pointer is not a function.
    EXITED = 20
    NO_FUNCTION = 21


class Access(IntEnum):
    LOAD = 1
    STORE = 2
    TRAP = 3
    ATOMIC = 4
    # The following kinds access no memory. Up to PART_OF_WARP, `address` is the barrier's number or a mask of lanes.
    BARRIER = 5
    BARRIER_OPERAND = 6
    EXCHANGE = 7
    NO_MEMBER = 8
    PART_OF_WARP = 9
    BREAKPOINT = 20
    STACK_OVERFLOW = 21
    NO_FUNCTION = 22
    NO_TARGET = 23
    ASSERTION = 24
    NO_ALLOCATION = 25


class Fault(ctypes.Structure):
    """A fault's place and reason, written when a kernel ends early."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("access", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("thread", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        # For a failed assertion, the addresses of its three texts, and its line.
        ("assertion", ctypes.c_uint64 * 4),
    )


class BlockEnvironment(ctypes.Structure):
    """The environment in which a block runs: the context's memory and the block's areas, as host addresses and sizes.

    `block` is the number of the block that runs in the environment, or of the first of several blocks. `resumes` is 1
    if that block was set aside and continues, and 0 if it begins. `next` links environments. `returned` is the address
    of a `Returned`. Atomic operations of the block in ended regions use `scratch`, which is zeroed before each of them.
    """

    _fields_ = (
        ("arena", ctypes.c_uint64),
        ("shadow", ctypes.c_uint64),
        ("last_granule", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("local", ctypes.c_uint64),
        ("frames", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("prints", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("resumes", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("returned", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64 * 2),
        # An environment has two cache lines, because different host threads use neighbouring environments.
        ("reserved", ctypes.c_uint64 * 2),
    )


class Returned(ctypes.Structure):
    """The ended regions, for accesses that the shadow table forbids.

    Regions begin at `start` and have `granules` granules. `counters` is the address of a table with one word for each
    granule: the address of its region's count of stray accesses, or 0 if the granule is in no ended region. A stray
    access is one in an ended region. `strays` counts those of all regions. Stray loads read `zeros`, and stray stores
    write to `sink`, which is never read.
    """

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("granules", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("strays", ctypes.c_uint64),
        ("zeros", ctypes.c_uint64 * 2),
        ("sink", ctypes.c_uint64 * 2),
    )


REGION_SHIFT = 21
REGION_GRANULE_BYTES = 1 << REGION_SHIFT
"""Regions begin and end at multiples of this many bytes, as on a card."""


class PrintHead(ctypes.Structure):
    """The head of kernels' output. Of the `capacity` bytes after it, `used` are records; `dropped` did not fit."""

    _fields_ = (
        ("used", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("lock", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class PrintRecord(ctypes.Structure):
    """The head of the record of one call of printf. `size` includes the head."""

    _fields_ = (("size", ctypes.c_uint32), ("kernel", ctypes.c_uint32))


class Mark(IntEnum):
    """Meanings of bytes in a conversion of a format. Any other byte ends the conversion."""

    FLAG = 1
    LONG = 2
    STAR = 3
    INTEGER = 4
    WIDE = 5
    STRING = 6


class QueuedLaunch(ctypes.Structure):
    """The head of a slot of the queue, which is one launch. The launch's parameters follow.

    `chunk` blocks at a time run in an environment, of which there are at most `environment_count`. If `chunk` is 0, all
    blocks run one after another in the first environment. `running` is the address of the kernel's KernelRunning, from
    which the stream takes the current `entry`. A slot with the `entry` 0 ends the stream's thread.
    """

    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("variables", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("kernel", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("environment_count", ctypes.c_uint32),
        ("shared_stride", ctypes.c_uint32),
        ("local_stride", ctypes.c_uint32),
        ("frame_stride", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("running", ctypes.c_uint64),
    )


# The same head for `struct`, which packs it several times faster than ctypes.
LAUNCH_HEAD = struct.Struct("<4Q13I4xQ")

PARAMETERS_OFFSET = ctypes.sizeof(QueuedLaunch)


class KernelRunning(ctypes.Structure):
    """The state of a kernel's execution. team.ll, stream.ll and submit.ll have the same offsets.

    `block_ns` is the time of one block at the last launch, or 0 if it is unknown. `entry` is the address of the
    kernel's runner, or 0 before the kernel is compiled. `first_code_ns` is the time that launches may still run in the
    first code. The stream counts it down. When it is negative, native code does not launch the kernel until Python has
    optimised it. It is 0 for optimised code.
    """

    _fields_ = (
        ("block_ns", ctypes.c_uint64),
        ("entry", ctypes.c_uint64),
        ("first_code_ns", ctypes.c_int64),
    )


class Semaphore(ctypes.Structure):
    """A glibc sem_t: 32 bytes on 64-bit machines."""

    _fields_ = (("opaque", ctypes.c_uint64 * 4),)


class StreamState(ctypes.Structure):
    """State that the caller and the stream's native loop share. stream.ll has the same offsets.

    `completed` counts the slots that the loop has finished. `faulted` is 1 after a fault until the caller takes it.
    Then `tag` and `kernel` are those of the launch at fault, and `fault` is the address of its record. `waiting` is 1
    while the caller sleeps on `done`.

    Only the caller (submit.ll) uses the fields after `done`: the number of slots that it has filled, the number of
    threads, the address of kernels' output, and the address of the counts of slots at the marks (CardProgress).
    """

    _fields_ = (
        ("completed", ctypes.c_uint64),
        ("faulted", ctypes.c_uint64),
        ("waiting", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("kernel", ctypes.c_uint64),
        ("ring", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("slot_mask", ctypes.c_uint64),
        ("idle_spins", ctypes.c_uint64),
        ("team", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("queued", Semaphore),
        ("done", Semaphore),
        ("submitted", ctypes.c_uint64),
        ("has_thread", ctypes.c_uint64),
        ("has_helpers", ctypes.c_uint64),
        ("prints", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
    )


class Team(ctypes.Structure):
    """State that the threads of a launch share. team.ll has the same offsets.

    `environments` is the address of the first environment. `helpers` is the number of threads besides the stream's, and
    `idle` the number of those that sleep. They are woken if at least `wake_ns` of work is left. `next` is the first
    block that no thread has taken. `used` counts the environments in use. After a fault, `stop` is 1, and `fault` is
    the address of its record.
    """

    _fields_ = (
        ("launch", ctypes.c_uint64),
        ("environments", ctypes.c_uint64),
        ("helpers", ctypes.c_uint64),
        ("wake_ns", ctypes.c_uint64),
        ("idle_yields", ctypes.c_uint64),
        ("ending", ctypes.c_uint64),
        # Words that are written for every chunk and words that idle threads poll are in separate cache lines.
        ("_gap1", ctypes.c_uint64 * 2),
        ("next", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("_gap2", ctypes.c_uint64 * 4),
        ("state", ctypes.c_uint64),
        ("idle", ctypes.c_uint64),
        ("_gap3", ctypes.c_uint64 * 6),
        ("work", Semaphore),
        ("done", Semaphore),
    )
