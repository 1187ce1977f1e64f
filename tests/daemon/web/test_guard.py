import asyncio
from typing import Any

import pytest

from gpulease.daemon.web.guard import Guard

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]", "gpu1.example"})
HOST = (b"host", b"127.0.0.1:9400")


def asked(path: str, *headers: tuple[bytes, bytes], method: str = "GET") -> tuple[int, dict[bytes, bytes]]:
    """The status and headers of the answer."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(Guard(app, HOSTS, frozenset({"gpu1.example"}))(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    "host", [b"127.0.0.1", b"127.0.0.1:9400", b"LOCALHOST:9400", b"[::1]", b"[::1]:9400", b"gpu1.example:443"]
)
def test_names_it_is_asked_by(host: bytes) -> None:
    assert asked("/api/v1/state", (b"host", host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"127.0.0.1.evil.example",
        b"127.0.0.1:80.evil.example",
        b"",
        b":9400",
        b"[::1",
        b"::1",
        b"a@localhost",
    ],
)
def test_a_name_that_somebody_made_resolve_here(host: bytes) -> None:
    assert asked("/", (b"host", host))[0] == 421


def test_no_host_or_two() -> None:
    assert asked("/")[0] == 400
    assert asked("/", HOST, (b"host", b"localhost"))[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X"])
def test_it_is_only_read(method: str) -> None:
    status, headers = asked("/api/v1/state", HOST, method=method)
    assert (status, headers[b"allow"], headers[b"connection"]) == (405, b"GET, HEAD", b"close")
    assert asked("/", HOST, method="HEAD")[0] == 200


@pytest.mark.parametrize(
    "header", [(b"content-length", b"1"), (b"transfer-encoding", b"chunked"), (b"content-length", b"00")]
)
def test_bodies_are_not_read(header: tuple[bytes, bytes]) -> None:
    assert asked("/", HOST, header)[0] == 413
    assert asked("/", HOST, (b"content-length", b"0"))[0] == 200


@pytest.mark.parametrize(
    ("site", "path", "status"),
    [
        (b"cross-site", "/api/v1/state", 403),
        (b"same-site", "/api/v1/events", 403),
        (b"cross-site", "/metrics", 403),
        (b"cross-site", "/page.js", 403),
        (b"cross-site", "/", 200),
        (b"same-origin", "/api/v1/state", 200),
        (b"none", "/api/v1/state", 200),
    ],
)
def test_other_pages_get_nothing(site: bytes, path: str, status: int) -> None:
    assert asked(path, HOST, (b"sec-fetch-site", site))[0] == status


LEASE = f"/api/v1/leases/{1:032x}"
FENCE = "/api/v1/fences/GPU-1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([(b"origin", b"http://127.0.0.1:9400")], 200),
        ([(b"origin", b"http://127.0.0.1:9400"), (b"sec-fetch-site", b"same-origin")], 200),
        ([(b"origin", b"https://GPU1.example")], 200),
        ([(b"origin", b"http://127.0.0.1:9401")], 403),
        ([(b"origin", b"http://localhost:9400")], 403),
        ([(b"origin", b"http://127.0.0.1:9400"), (b"origin", b"http://127.0.0.1:9400")], 403),
        ([(b"origin", b"null")], 403),
        ([(b"origin", b"")], 403),
        ([(b"origin", b"file://127.0.0.1:9400")], 403),
        ([(b"origin", b"http://gpu1.example.evil.example")], 403),
        ([(b"origin", b"http://evil.example")], 403),
        ([(b"sec-fetch-site", b"none")], 403),
        ([(b"sec-fetch-site", b"same-site")], 403),
        ([(b"sec-fetch-site", b"cross-site")], 403),
        ([(b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"cross-site")], 403),
        ([(b"content-length", b"2")], 413),
    ],
)
def test_whose_page_may_change_something(headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert asked(LEASE, HOST, *headers, method="DELETE")[0] == status


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/api/v1/drain"), ("DELETE", "/api/v1/drain/GPU-1"), ("DELETE", FENCE)]
)
def test_the_other_acts_are_guarded_as_a_revocation_is(method: str, path: str) -> None:
    assert asked(path, HOST, method=method)[0] == 200
    for foreign in ((b"origin", b"http://evil.example"), (b"sec-fetch-site", b"same-site"), (b"origin", b"null")):
        assert asked(path, HOST, foreign, method=method)[0] == 403
    assert asked(path, (b"host", b"evil.example"), method=method)[0] == 421
    assert asked(path, HOST, (b"content-length", b"1"), method=method)[0] == 413
    assert asked(path, HOST, method="POST")[0] == 405


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS", "PATCH"])
def test_no_form_and_no_preflight_gets_through(method: str) -> None:
    status, headers = asked(LEASE, HOST, method=method)
    assert (status, headers[b"allow"]) == (405, b"DELETE")
    assert not [name for name in headers if name.startswith(b"access-control")]


@pytest.mark.parametrize("path", ["/", "/nothing"])
def test_what_every_answer_says(path: str) -> None:
    for found in (asked(path, HOST), asked(path, (b"host", b"evil"))):
        headers = found[1]
        assert b"default-src 'self'" in headers[b"content-security-policy"]
        assert b"unsafe" not in headers[b"content-security-policy"]
        assert b"frame-ancestors 'none'" in headers[b"content-security-policy"]
        assert headers[b"x-frame-options"] == b"DENY"
        assert b"set-cookie" not in headers
        assert headers[b"cache-control"] == b"no-store"
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert headers[b"cross-origin-resource-policy"] == b"same-origin"
