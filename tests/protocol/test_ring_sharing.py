import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import MIN_RING_BYTES, RingLayout, SharedMemory, SharedMemoryGrant, SharedMemoryRequest

SIZES = st.integers(0, 2**64 - 1)


@given(st.booleans(), SIZES, st.booleans())
def test_what_is_wanted_is_told(ring: bool, arena_bytes: int, words: bool) -> None:
    wanted = SharedMemoryRequest(ring, arena_bytes, words)
    assert SharedMemoryRequest.from_options((Tlv(77, b"new"), *wanted.to_options())) == wanted


@given(st.none() | st.just(RingLayout(MIN_RING_BYTES, MIN_RING_BYTES)), SIZES, st.booleans())
def test_what_is_given_is_told(ring: RingLayout | None, arena_bytes: int, words: bool) -> None:
    given = SharedMemoryGrant(ring, arena_bytes, words)
    assert SharedMemoryGrant.from_options((Tlv(77, b"new"), *given.to_options())) == given


@pytest.mark.parametrize("value", [b"", b"\0", b"\x02", b"\x01\x01", bytes(7), bytes(9)])
def test_what_is_not_known_is_not_there(value: bytes) -> None:
    options = [Tlv(kind, value) for kind in SharedMemory]
    assert SharedMemoryRequest.from_options(options) == SharedMemoryRequest()
    assert SharedMemoryGrant.from_options(options) == SharedMemoryGrant()
