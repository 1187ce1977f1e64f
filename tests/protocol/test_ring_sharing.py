import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import MIN_RING_BYTES, Given, RingLayout, SharedMemory, Wanted

SIZES = st.integers(0, 2**64 - 1)


@given(st.booleans(), SIZES, st.booleans())
def test_what_is_wanted_is_told(ring: bool, arena_bytes: int, words: bool) -> None:
    wanted = Wanted(ring, arena_bytes, words)
    assert Wanted.from_options((Tlv(77, b"new"), *wanted.to_options())) == wanted


@given(st.none() | st.just(RingLayout(MIN_RING_BYTES, MIN_RING_BYTES)), SIZES, st.booleans())
def test_what_is_given_is_told(ring: RingLayout | None, arena_bytes: int, words: bool) -> None:
    given = Given(ring, arena_bytes, words)
    assert Given.from_options((Tlv(77, b"new"), *given.to_options())) == given


@pytest.mark.parametrize("value", [b"", b"\0", b"\x02", b"\x01\x01", bytes(7), bytes(9)])
def test_what_is_not_known_is_not_there(value: bytes) -> None:
    options = [Tlv(kind, value) for kind in SharedMemory]
    assert Wanted.from_options(options) == Wanted()
    assert Given.from_options(options) == Given()
