"""A ring served by native code and by Python: both do the same, whatever the client puts in or overwrites."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.session import connection
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.opcodes import Status
from helpers.ring_pair import SMALL, Pair, pair
from helpers.ring_peer import READER_SLEEPS, REPLY_WRITER_SLEEPS, TAIL
from helpers.session_rig import KINDS, launch_of, quiet, stream_of, sync, told, without_addresses

REPLY_READER_SLEEPS = 48
WRITER_SLEEPS = 24
INSANE = (SMALL.request_bytes + 4097, 2**40, 2**63, 2**64 - 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RING_LAYOUT", SMALL)
    monkeypatch.setattr(connection, "SPIN_NS", 1000)


WORDS = st.sampled_from([READER_SLEEPS, WRITER_SLEEPS, REPLY_READER_SLEEPS, REPLY_WRITER_SLEEPS])
STEPS = st.one_of(
    st.tuples(st.just("frames"), st.lists(KINDS, min_size=1, max_size=30), st.integers(1, 2000)),
    st.tuples(st.just("word"), WORDS, st.sampled_from([0, 1, 2**64 - 1])),
    st.tuples(st.just("data"), st.integers(0, SMALL.request_bytes - 1), st.integers(0, 255)),
    st.tuples(st.just("tail"), st.just(0), st.one_of(st.integers(1, 5000), st.sampled_from(INSANE))),
    st.tuples(st.just("revoke"), st.just(0), st.just(0)),
)


# A head that makes no sense is not among them: which look at it is the next one is each side's own.


def follow(made: Pair, steps: list[tuple[str, object, int]]) -> tuple[object, ...]:
    made.made.context.does_them = False  # a stray address would be reported sooner or later, as it happens
    made.put(stream_of(made.made, ["scale", "bias"] * 4))
    for what, where, value in steps:
        match what, where:
            case "frames", list(kinds):
                stream = stream_of(made.made, kinds)
                for start in range(0, len(stream), value):
                    made.put(stream[start : start + value])
            case "word", int(word):
                made.words[word] = value
            case "data", int(place):
                made.data[place] = value
            case "tail", _:
                made.words[TAIL] = (made.words[TAIL] + value) & 2**64 - 1
            case _:
                made.made.page.refuse(Status.REVOKED)
        made.turn()
    return without_addresses(made.heard), made.is_served, told(made.made), made.made.contents


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=10))
def test_native_code_and_python_do_the_same(steps: list[tuple[str, object, int]]) -> None:
    outcomes = []
    for is_native in (False, True):
        with pair(is_native=is_native) as made:
            outcomes.append(follow(made, steps))
    assert outcomes[0] == outcomes[1]


def test_launches_and_syncs_are_served_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(is_native=True) as made:
        made.put(quiet(launch_of(made.made), 1) * 2 + sync(1))
        # What the ring's end cuts in two is seen by Python, but nothing is launched there.
        monkeypatch.setattr(made.made.session, "handle", None)
        monkeypatch.setattr(made.made.session._fast_path, "_take", None)
        for number in range(2, 300):
            made.words[REPLY_READER_SLEEPS] = number % 3 == 0
            made.put(quiet(launch_of(made.made), number) * 3 + sync(number))
        replies = bytes(made.heard)
        assert [replies[at + 16 : at + 24] for at in range(0, len(replies), 40)] == [
            number.to_bytes(8, "big") for number in range(1, 300)
        ]
        assert made.made.context.taken_natively == 1 + 298 * 3
        assert made.made.page.counter(Counter.SYNCS) == 299
        # It is woken when it says that it sleeps, and else left alone.
        assert made.bells() == 99


def test_a_writer_that_waits_for_room_is_woken() -> None:
    for is_native in (False, True):
        with pair(is_native=is_native) as made:
            made.put(quiet(launch_of(made.made), 1) * 2)
            made.words[WRITER_SLEEPS] = 1
            made.put(quiet(launch_of(made.made), 2) * 8)
            assert made.words[WRITER_SLEEPS] == 0
            assert made.bells() == 1
            assert len(made.made.context.launches) == 10


def test_the_quantum_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always has more to do gets its quantum and no more, and goes on in the next round."""
    monkeypatch.setattr(connection, "QUANTUM_NS", 0)
    with pair(is_native=True) as made:
        made.put(quiet(launch_of(made.made), 1) * 2)
        made.server._ready.clear()
        made.requests.put(quiet(launch_of(made.made), 3) * 4)
        made.server._serve(made.connection)
        assert made.server._ready == {made.connection.fd}
        monkeypatch.undo()


def test_replies_without_room_are_left_to_python() -> None:
    """The ring is full of unread replies: Python pauses the connection until the peer reads."""
    with pair(is_native=True) as made:
        made.put(quiet(launch_of(made.made), 1) * 2 + sync(1))
        asked = SMALL.reply_bytes // HEADER_BYTES + 1
        for number in range(asked):
            assert made.requests.put_whole(sync(number + 1))
            made.server._serve(made.connection)
        assert made.connection.send_buffer is not None
        assert made.requests.put_whole(sync(asked + 1))
        made.server._serve(made.connection)
        assert made.made.page.counter(Counter.SYNCS) == asked + 1, "nothing more is done meanwhile"
        made.heard.clear()
        made.turn()
        made.turn()
        assert made.connection.send_buffer is None
        assert len(made.heard) == HEADER_BYTES * (asked + 1)
        assert made.made.page.counter(Counter.SYNCS) == asked + 2
