import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.config.settings import ConfigError, load_config
from gpulease.daemon.web.http_settings import BadToken, HttpSettings, parse_http
from gpulease.protocol.address import TcpAddress
from gpulease.protocol.http_origin import parse_host_names

TOKEN = "0123456789abcdef0123456789ABCDEF"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9400", TcpAddress("127.0.0.1", 9400)),
        ("127.8.0.1:0", TcpAddress("127.8.0.1", 0)),
        ("[::1]:9400", TcpAddress("::1", 9400)),
    ],
)
def test_where_it_is_served(text: str, address: TcpAddress) -> None:
    assert parse_http(text) == address


@pytest.mark.parametrize("text", ["0.0.0.0:9400", "10.1.2.3:80", "[::]:9400", "[fe80::1]:9400", "[::ffff:10.0.0.1]:1"])
def test_nothing_is_served_off_loopback(text: str) -> None:
    with pytest.raises(ValueError, match=r"not on loopback.*proxy that terminates TLS"):
        parse_http(text)


@pytest.mark.parametrize("text", ["localhost:9400", "gpu1.example:80", "127.1:80"])
def test_a_name_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="contains no IP address"):
        parse_http(text)


@pytest.mark.parametrize(
    "value", ["9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "::1:80", "", 9400, True, None]
)
def test_what_is_no_address(value: Any) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:"):
        parse_http(value)


def test_what_it_takes_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ConfigError, match=r"http: uvicorn must be installed.*pip install '\.\[serve\]'"):
        load_config(None, {"http": "127.0.0.1:0"})


def test_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('http = "127.0.0.1:9400"\nhttp_hosts = ["GPU1.example"]\nhttp_token_file = "/etc/token"\n')
    config = load_config(path, {})
    assert config.of_http == HttpSettings(
        TcpAddress("127.0.0.1", 9400), frozenset({"gpu1.example"}), Path("/etc/token")
    )
    assert load_config(None, {}).of_http is None
    for rest in ('http_hosts = "a"', 'http_token_file = "/etc/token"'):
        path.write_text(rest)
        with pytest.raises(ConfigError, match="need http, the address"):
            load_config(path, {})


@pytest.mark.parametrize("name", ["a b", "a:80", "*.example", "-a", "", "a/b", "ü.example", "a" * 254])
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        parse_host_names([name])


def settings_with(token_file: Path | None) -> HttpSettings:
    return HttpSettings(TcpAddress("127.0.0.1", 0), frozenset(), token_file)


def test_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert settings_with(path).token_digest() == hashlib.sha256(TOKEN.encode()).digest()
    assert settings_with(None).token_digest() == b""


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        (TOKEN[1:], 0o600, "32 characters"),
        ("", 0o600, "32 characters"),
        (" " * 4000 + TOKEN + " " * 4000, 0o600, "32 characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "a Bearer token"),
        (f"{TOKEN}\0", 0o600, "a Bearer token"),
        (f"{TOKEN}é", 0o600, "a Bearer token"),
    ],
)
def test_what_is_no_token(tmp_path: Path, content: str, mode: int, why: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(BadToken, match=why):
        settings_with(path).token_digest()


def test_a_token_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadToken, match="No such file"):
        settings_with(tmp_path / "token").token_digest()
    # Nobody writes to the FIFO: opening it to read would wait forever.
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(BadToken, match="must be a regular file"):
            settings_with(path).token_digest()
