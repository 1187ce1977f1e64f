import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.address import (
    DEFAULT_ADDRESS,
    MAX_DIRECTORIES,
    MAX_UNIX_PATH_BYTES,
    Address,
    FleetAddress,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    parse_address,
    parse_fleet_address,
)

GOOD = {
    "unix:/run/gpulease.sock": UnixAddress("/run/gpulease.sock"),
    "unix:/a:b": UnixAddress("/a:b"),
    "unix:/" + "x" * (MAX_UNIX_PATH_BYTES - 1): UnixAddress("/" + "x" * (MAX_UNIX_PATH_BYTES - 1)),
    "tcp:localhost:0": TcpAddress("localhost", 0),
    "tcp:127.0.0.1:65535": TcpAddress("127.0.0.1", 65535),
    "tcp:[::1]:7070": TcpAddress("::1", 7070),
    "tls:gpu1.example:7071": TlsAddress("gpu1.example", 7071),
    "tls:[fe80::1]:7071": TlsAddress("fe80::1", 7071),
}
WITH_SLASHES = {
    "tls://gpu1.example:7071": TlsAddress("gpu1.example", 7071),
    "tcp://[::1]:7070": TcpAddress("::1", 7070),
    "unix:///run/gpulease.sock": UnixAddress("///run/gpulease.sock"),
}
BAD = {
    "": "is not an address",
    "/run/gpulease.sock": "is not an address",
    "http://localhost": "is not an address",
    "UNIX:/x": "is not an address",
    "unix:": "must be absolute",
    "unix:run/x": "must be absolute",
    "unix:/a\0b": "no NUL",
    "unix:/" + "x" * MAX_UNIX_PATH_BYTES: "at most 107 bytes",
    "unix:/" + "é" * 54: "at most 107 bytes",
    "tls:///localhost:1": "is not a valid host name",
    "tls:/localhost:1": "is not a valid host name",
    "tls://": "port from 0 to 65535",
    "tls://localhost:1/x": "port from 0 to 65535",
    "tcp:": "port from 0 to 65535",
    "tcp:localhost": "port from 0 to 65535",
    "tcp::80": "port from 0 to 65535",
    "tcp:[]:80": "port from 0 to 65535",
    "tcp:localhost:": "port from 0 to 65535",
    "tcp:localhost:65536": "port from 0 to 65535",
    "tcp:localhost:-1": "port from 0 to 65535",
    "tcp:localhost:+1": "port from 0 to 65535",
    "tcp:localhost: 1": "port from 0 to 65535",
    "tcp:localhost:\N{FULLWIDTH DIGIT ONE}": "port from 0 to 65535",
    "tcp:::1:80": "in brackets, tcp:",
    "tls:::1:80": "in brackets, tls:",
    "tls:localhost": "write tls:HOST:PORT",
    "unix:/\udcff": "it contains half of a surrogate pair",
    "tcp:\ud800:80": "half of a surrogate pair",
    "tcp:a\0b:80": "is not a valid host name",
    "tcp:a..b:80": "is not a valid host name",
    "tls:" + "a" * 64 + ".example:80": "is not a valid host name",
    "fleet:tls:a:1": "is a fleet's address; use the address of a single daemon",
    "tcp:localhost:" + "9" * 5000: "it has 5014 characters",
}


@pytest.mark.parametrize("text", GOOD)
def test_an_address_reads_and_prints_as_itself(text: str) -> None:
    assert parse_address(text) == GOOD[text]
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", WITH_SLASHES)
def test_an_address_may_have_slashes(text: str) -> None:
    assert parse_address(text) == WITH_SLASHES[text]


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_address_is_told_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=BAD[text]):
        parse_address(text)


A, B, SOCKET = TlsAddress("a.example", 7444), TlsAddress("b.example", 7444), UnixAddress("/run/d.sock")
FLEETS: dict[str, tuple[Address, ...]] = {
    "fleet:tls:a.example:7444": (A,),
    "fleet:tls:a.example:7444,tls:b.example:7444": (A, B),
    "fleet:unix:/run/d.sock,tcp:[::1]:1": (SOCKET, TcpAddress("::1", 1)),
}
OTHER_SPELLINGS: dict[str, tuple[Address, ...]] = {
    "fleet:tls://a.example:7444": (A,),
    "fleet:tls://a.example:7444,tls:b.example:7444": (A, B),
    "fleet:tcp://[::1]:1": (TcpAddress("::1", 1),),
}
BAD_FLEETS = {
    "": "is not a fleet's address",
    "tls:a.example:7444": "is not a fleet's address",
    "fleet:": "is not an address",
    "fleet:a.example:7444": "is not an address",
    "fleet:tls:a.example:7444,": "is not an address",
    "fleet:tls:a.example": "port from 0 to 65535",
    "fleet:fleet:tls:a.example:1": "is a fleet's address",
    "fleet:tls:a.example:1,tls://a.example:1": "names a directory twice",
    "fleet:" + ",".join(f"tcp:a:{port}" for port in range(MAX_DIRECTORIES + 1)): "at most 16 directories",
    "fleet:tcp:localhost:" + "9" * 5000: "characters",
}


@pytest.mark.parametrize("text", FLEETS)
def test_a_fleet_s_address_reads_and_prints_as_itself(text: str) -> None:
    assert parse_fleet_address(text) == FleetAddress(FLEETS[text])
    assert str(parse_fleet_address(text)) == text


@pytest.mark.parametrize("text", OTHER_SPELLINGS)
def test_a_fleet_s_address_may_have_slashes(text: str) -> None:
    assert parse_fleet_address(text) == FleetAddress(OTHER_SPELLINGS[text])


@pytest.mark.parametrize("text", BAD_FLEETS)
def test_a_wrong_fleet_s_address_is_told_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=BAD_FLEETS[text]):
        parse_fleet_address(text)


def test_the_default_is_an_address() -> None:
    assert str(parse_address(DEFAULT_ADDRESS)) == DEFAULT_ADDRESS


@given(st.text() | st.text().map("unix:/".__add__) | st.text().map("tcp:".__add__) | st.text().map("tls:".__add__))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert parse_address(str(address)) == address
