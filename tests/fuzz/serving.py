"""The worker's loop for a ring, twice: in native code, daemon/session/native/serve.ll, and in Python,
launch_fast_path.py.

The invariant. Whatever a client writes into its ring, announces or overwrites, both have the same effects:

- the same launches with the same arguments in the same order, and no argument that was not sent;
- the same bytes in the session's memory, and none outside the allocation that a copy names;
- the same replies, byte for byte, and the same counters on the control page;
- the connection stays open or ends in both, and nothing else happens: no crash, no exception.

Launches are recorded and not executed; see `helpers.session_rig`.
"""

from collections.abc import Callable, Iterator

from gpulease.daemon.session import connection
from gpulease.protocol.opcodes import Status
from helpers.ring_pair import SMALL, Pair, pair
from helpers.ring_peer import READER_SLEEPS, REPLY_WRITER_SLEEPS, TAIL
from helpers.session_rig import MEMORY_KINDS, stream_of, told, without_addresses

from .draws import Draws

MAX_BYTES = 512
SETTINGS = {"RING_LAYOUT": SMALL, "SPIN_NS": 1000, "QUANTUM_NS": 1 << 40}
"""Settings with which a turn ends only when nothing is left: after a limited time, the two might have done different
parts.
"""

MAX_STEPS = 16
MAX_PIECES = 12
KINDS = (
    "scale",
    "scale",
    "bias",
    "scale wide",
    "scale by Python",
    "gaps",
    "foreign",
    "no kernel",
    "cut",
    "sync",
    "sync",
    *MEMORY_KINDS,
)
DAMAGED = (*KINDS[:8], *MEMORY_KINDS)
NAMES = {"cut": "truncated sizes"}
REPLY_READER_SLEEPS, WRITER_SLEEPS = 48, 24
WORDS = (READER_SLEEPS, WRITER_SLEEPS, REPLY_READER_SLEEPS, REPLY_WRITER_SLEEPS)
AHEAD = (1, 40, 90, SMALL.request_bytes, SMALL.request_bytes + 1, 1 << 40, 1 << 63, (1 << 64) - 1)
WARM = ["scale", "bias"] * 2
"""Launches with which every client begins, so that recorded plans exist."""


def check(data: bytes) -> None:
    earlier = {name: vars(connection)[name] for name in SETTINGS}
    vars(connection).update(SETTINGS)
    try:
        outcomes = []
        for is_native in (False, True):
            with pair(is_native=is_native) as made:
                made.made.context.does_them = False
                outcomes.append(follow(made, Draws(data)))
        assert outcomes[0] == outcomes[1]
    finally:
        vars(connection).update(earlier)


def follow(made: Pair, draws: Draws) -> tuple[object, ...]:
    """Do what the input says. Returns the outcome."""
    made.made.context.refuse_tag = draws.below(32)
    made.put(stream_of(made.made, WARM * (1 + draws.below(12))))
    for _ in range(MAX_STEPS):
        if draws.is_over or not made.is_served:
            break
        STEPS[draws.below(len(STEPS))](made, draws)
        made.turn()
    made.turn()
    return without_addresses(made.heard), made.is_served, told(made.made), made.made.contents


def put_frames(made: Pair, draws: Draws) -> None:
    kinds = [draws.pick(KINDS) for _ in range(draws.below(12))]
    stream = stream_of(made.made, [NAMES.get(kind, kind) for kind in kinds])
    # For each piece, the worker has one turn.
    size = max(1 + draws.number(2) % 1500, len(stream) // MAX_PIECES)
    for start in range(0, len(stream), size):
        made.put(stream[start : start + size])


def put_damaged(made: Pair, draws: Draws) -> None:
    stream = bytearray(stream_of(made.made, [draws.pick(DAMAGED) for _ in range(1 + draws.below(3))]))
    for _ in range(1 + draws.below(3)):
        stream[draws.number(2) % len(stream)] = draws.byte()
    made.put(bytes(stream))


def put_bytes(made: Pair, draws: Draws) -> None:
    made.put(draws.sized(100))


def set_word(made: Pair, draws: Draws) -> None:
    made.words[draws.pick(WORDS)] = draws.pick((0, 1, (1 << 64) - 1))


def set_data(made: Pair, draws: Draws) -> None:
    made.data[draws.number(2) % SMALL.request_bytes] = draws.byte()


def jump(made: Pair, draws: Draws) -> None:
    """Announce bytes that were not written. The worker may not have noticed earlier ones yet."""
    made.words[TAIL] = (made.words[TAIL] + draws.pick(AHEAD)) & (1 << 64) - 1


def revoke(made: Pair, draws: Draws) -> None:
    made.made.page.refuse(draws.pick((Status.REVOKED, Status.LEASE_EXPIRED, Status.FENCED)))


STEPS: tuple[Callable[[Pair, Draws], None], ...] = (
    put_frames,
    put_damaged,
    put_frames,
    put_bytes,
    set_word,
    set_data,
    jump,
    revoke,
)


def seeds() -> Iterator[bytes]:
    for kind in range(len(KINDS)):
        yield bytes([0, 2, 0, 8, *[0, 2, kind] * 2, 9, 1, 0, 40])
        yield bytes([9, 2, 0, 3, 0, kind, 9, 0, 13]) * 3
    for step in range(1, len(STEPS)):
        for value in range(4):
            yield bytes([0, 1, 0, 3, 0, 2, 9, 4, 0, step, value, value * 60, value, 7, 0, 3, 0, 2, 9, 2, 0])
    yield bytes([0, 0]) + bytes([0, 11, *[0, 2] * 5, 9, 0, 77]) * 12
