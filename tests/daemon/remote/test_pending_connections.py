import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.remote.pending_connections import MAX_RECORD_BYTES, PEEK_BYTES, first_record_bytes


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_a_client_s_first_record_is_measured() -> None:
    hello = client_hello()
    assert first_record_bytes(hello[:PEEK_BYTES]) == first_record_bytes(hello) == len(hello)


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / ",
        b"\x17\x03\x03\x00\x20\x01",  # application data
        b"\x16\x02\x00\x00\x20\x01",  # SSL 2
        b"\x16\x03\x01\x00\x20\x02",  # a ServerHello
        b"\x16\x03\x01\x00\x03\x01",
        b"\x16\x03\x01\x40\x01\x01",
    ],
)
def test_all_else_is_no_beginning(begin: bytes) -> None:
    assert first_record_bytes(begin) is None


@given(st.binary(min_size=PEEK_BYTES))
def test_whatever_comes_the_wait_is_bounded(begin: bytes) -> None:
    needed = first_record_bytes(begin)
    assert needed is None or 9 <= needed <= 5 + MAX_RECORD_BYTES
