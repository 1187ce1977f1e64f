"""The check of Host, Origin, Sec-Fetch-Site, lengths; tests/daemon/web/test_guard.py has the web page's use of it."""

from dataclasses import replace

import pytest

from gpulease.protocol.http_origin import KnownHosts, headers_of, host_of, loopback_hosts, refusal

KNOWN = KnownHosts(loopback_hosts("127.0.0.1"), frozenset({"models.example"}), "--host-name")
ON_A_PATH = KnownHosts(None, frozenset({"models.example"}), "--host-name")
HOST = (b"host", b"127.0.0.1:8080")


def status(known: KnownHosts, *headers: tuple[bytes, bytes], is_act: bool = True, is_linked: bool = False) -> int:
    refused = refusal(headers_of(headers), known, is_act=is_act, is_linked=is_linked)
    return 200 if refused is None else refused[0]


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        (b"127.0.0.1:8080", 200),
        (b"localhost", 200),
        (b"MODELS.example:443", 200),
        (b"evil.example", 421),
        (b"127.0.0.1.evil.example:8080", 421),
        (b"[::1]:8080", 421),
        (b"", 421),
    ],
)
def test_a_program_is_known_by_the_host_it_asks_alone(host: bytes, wanted: int) -> None:
    assert status(KNOWN, (b"host", host)) == wanted
    # On a Unix socket no name can be made to resolve to the server.
    assert status(ON_A_PATH, (b"host", host)) == 200


@pytest.mark.parametrize("host", [b"[", b"[::z", b"[::1::]", b"a b", b"a/b", b"a@b", b"a:b", b"\xe9", b"a\x00"])
def test_a_host_that_no_url_can_have_is_refused_wherever_it_is_asked(host: bytes) -> None:
    assert status(ON_A_PATH, (b"host", host)) == 400
    assert status(KNOWN, (b"host", host)) in (400, 421)


def test_a_request_has_one_length() -> None:
    for known in (KNOWN, ON_A_PATH):
        assert status(known, HOST, (b"content-length", b"3")) == 200
        assert status(known, HOST, (b"transfer-encoding", b"chunked")) == 200
        assert status(known, HOST, (b"content-length", b"3"), (b"transfer-encoding", b"chunked")) == 400


def test_there_is_one_host() -> None:
    for known in (KNOWN, ON_A_PATH):
        assert status(known) == 400
        assert status(known, HOST, HOST) == 400


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (b"http://127.0.0.1:8080", 200),
        (b"https://models.example", 200),
        (b"http://127.0.0.1:9000", 403),
        (b"http://evil.example", 403),
        (b"null", 403),
    ],
)
def test_a_page_that_acts_is_the_server_s_own_or_the_proxy_s(origin: bytes, wanted: int) -> None:
    for known in (KNOWN, ON_A_PATH):
        assert status(known, HOST, (b"origin", origin)) == wanted
        assert status(known, HOST, (b"origin", origin), is_act=False) == 200


@pytest.mark.parametrize(
    ("site", "wanted"), [(b"none", 200), (b"same-origin", 200), (b"same-site", 403), (b"cross-site", 403)]
)
def test_a_foreign_page_reads_nothing_but_what_links_may_lead_to(site: bytes, wanted: int) -> None:
    assert status(KNOWN, HOST, (b"sec-fetch-site", site), is_act=False) == wanted
    assert status(KNOWN, HOST, (b"sec-fetch-site", site), is_act=False, is_linked=True) == 200


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [(b"https://chat.example", 200), (b"https://chat.example:8443", 403), (b"http://chat.example", 403)],
)
def test_a_page_that_the_operator_admits_may_act_and_read_under_a_known_host(origin: bytes, wanted: int) -> None:
    known = replace(KNOWN, origins=frozenset({b"https://chat.example"}))
    asked = (b"origin", origin), (b"sec-fetch-site", b"cross-site")
    for is_act in (False, True):
        assert status(known, HOST, *asked, is_act=is_act) == wanted
        assert status(known, (b"host", b"evil.example"), *asked, is_act=is_act) == 421
        assert status(replace(known, origins=frozenset({b"*"})), HOST, *asked, is_act=is_act) == 200
        # Two origins are nobody's.
        assert status(known, HOST, *asked, (b"origin", origin), is_act=is_act) == 403


def test_hosts_without_ports() -> None:
    assert host_of(b"a:1:2") == "a:1"
    assert host_of(b"a:x") == ""
    assert host_of("ä".encode()) == "ã¤"
    assert loopback_hosts("::1") == {"[::1]", "localhost"}
