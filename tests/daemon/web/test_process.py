"""The web process in front of a scripted broker: what it answers to whom, and what it may do itself."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpulease.daemon import web
from gpulease.daemon.host.processes import name_of
from gpulease.daemon.leases.denials import invalid
from gpulease.daemon.leases.events import RequestDenied, RevokeDone
from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.web.app import MAX_STREAMS, SCRIPTS
from gpulease.daemon.web.load_samples import CardLoads, LoadSample
from gpulease.daemon.workers.helper_process import ordinary_timeouts
from gpulease.protocol.opcodes import Phase, RevokeOutcome
from helpers.processes import stop_process
from helpers.waiting import wait_until
from helpers.web_rig import CARD, GIB, Scene, WebRig, lease

TOKEN = "0123456789abcdef0123456789ABCDEF"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ONE = f"{1:032x}"


@pytest.fixture
def scene() -> Scene:
    return Scene(leases=[lease(1, "ann"), lease(2, "<b>bob</b>")])


@pytest.fixture
def rig(scene: Scene, tmp_path: Path) -> Iterator[WebRig]:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    with WebRig(scene, path, frozenset({"gpu1.example"})) as rig:
        yield rig


def asked(rig: WebRig, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(rig.url + path, headers=headers, timeout=60, trust_env=False, verify=False)


def tenants(answer: httpx.Response) -> list[str]:
    return [one["tenant"] for card in answer.json()["cards"] for one in card["slices"]]


@pytest.mark.exhaustive
def test_who_sees_what(rig: WebRig) -> None:
    assert tenants(asked(rig, "api/v1/state", BEARER)) == ["ann", "<b>bob</b>"]
    hidden = asked(rig, "api/v1/state")
    assert all(name.startswith("tenant ") for name in tenants(hidden))
    assert "ann" not in hidden.text
    for wrong in ("Bearer x", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x"):
        answer = asked(rig, "api/v1/state", {"Authorization": wrong})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert asked(rig, "", {"Host": "gpu1.example"}).status_code == 200
    assert asked(rig, "", {"Host": "evil.example"}).status_code == 421


@pytest.mark.exhaustive
def test_the_page_loads_nothing_from_elsewhere(rig: WebRig) -> None:
    for path, kind in (
        ("", "text/html"),
        ("page.css", "text/css"),
        *((name, "text/javascript") for name in SCRIPTS),
        ("icon.svg", "image"),
    ):
        answer = asked(rig, path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "style=" not in asked(rig, "").text, "the policy forbids it"
    for name in SCRIPTS:
        assert "innerHTML" not in asked(rig, name).text
    scripts = (Path(web.__file__).parent / "page").glob("*.js")
    assert {path.name for path in scripts} == set(SCRIPTS), "each is served"
    assert asked(rig, "nothing").status_code == 404


@pytest.mark.exhaustive
def test_health_and_metrics(rig: WebRig, scene: Scene) -> None:
    assert asked(rig, "healthz").text == "ok\n"
    assert asked(rig, "readyz").json() == {"ready": True, "checks": []}
    scene.health = {"ready": False, "checks": [{"check": "zygote", "ok": False, "detail": "it is being started"}]}
    wait_until(lambda: asked(rig, "readyz").status_code == 503, "an answer is kept for half a second")
    assert asked(rig, "readyz").json()["checks"][0]["check"] == "zygote"
    scene.metrics = 'gpu_lease_acquired_total{tenant="ann"} 3\n'
    answer = asked(rig, "metrics", BEARER)
    assert answer.text == scene.metrics
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "ann" not in asked(rig, "metrics").text
    assert asked(rig, "metrics").text.endswith('"} 3\n')


@pytest.mark.exhaustive
def test_a_stream(rig: WebRig, scene: Scene) -> None:
    def states(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    with httpx.stream(
        "GET", rig.url + "api/v1/events", headers=BEARER, timeout=60, trust_env=False, verify=False
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = states(answer.iter_lines())
        assert len(next(told)["cards"][0]["slices"]) == 2
        scene.leases = [lease(3, "eve")]
        rig.tell(3, Phase.ACTIVE, "", "line\nbreak\u2028and more")
        state = next(state for state in told if state["events"])
        assert [one["tenant"] for one in state["cards"][0]["slices"]] == ["eve"]
        assert state["events"][0]["reason"] == "line\nbreak\u2028and more"


@pytest.mark.exhaustive
def test_streams_are_bounded_and_given_back(rig: WebRig) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_STREAMS):
            stream = httpx.stream("GET", rig.url + "api/v1/events", timeout=60, trust_env=False, verify=False)
            lines = stack.enter_context(stream).iter_lines()
            stack.callback(lines.close)  # type: ignore[attr-defined]
            assert next(lines).startswith(":")
        one_more = asked(rig, "api/v1/events")
        assert (one_more.status_code, one_more.headers["retry-after"]) == (503, "5")
        assert asked_stream(rig, BEARER) == 200, "operators have places of their own"
    wait_until(lambda: asked_stream(rig) == 200, "the places are given back")


def test_streams_asked_for_at_once_are_bounded_too(rig: WebRig) -> None:
    where = httpx.URL(rig.url)
    with ExitStack() as stack:
        peers = [socket.create_connection((where.host, where.port or 0), timeout=60) for _ in range(2 * MAX_STREAMS)]
        for peer in peers:
            stack.enter_context(peer)
        assert asked(rig, "healthz").status_code == 200, "all that came before it are connected"
        stop_process(rig.process_id)
        for peer in peers:
            peer.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        os.kill(rig.process_id, signal.SIGCONT)
        statuses = sorted(peer.recv(12) for peer in peers)
    assert statuses == [b"HTTP/1.1 200"] * MAX_STREAMS + [b"HTTP/1.1 503"] * MAX_STREAMS
    wait_until(lambda: asked_stream(rig) == 200, "the places are given back")


def asked_stream(rig: WebRig, headers: dict[str, str] | None = None) -> int:
    with httpx.stream(
        "GET", rig.url + "api/v1/events", headers=headers, timeout=60, trust_env=False, verify=False
    ) as answer:
        return answer.status_code


def deleted(rig: WebRig, lease_id: str = ONE, headers: dict[str, str] | None = None, **query: str) -> httpx.Response:
    where = f"{rig.url}api/v1/leases/{lease_id}"
    return httpx.delete(
        where, headers=BEARER if headers is None else headers, params=query, timeout=60, trust_env=False
    )


@pytest.mark.exhaustive
def test_an_operator_revokes(rig: WebRig, scene: Scene) -> None:
    done = deleted(rig, reason="two words \u2028 and\nmore")
    assert (done.status_code, done.json()) == (200, {"lease_id": ONE, "outcome": "torndown"})
    assert deleted(rig).status_code == 200
    assert scene.revoked == [(1, "two words \u2028 and\nmore"), (1, "revoked by the operator")]
    for outcome, status, word in ((RevokeOutcome.FENCED, 200, "fenced"), (RevokeOutcome.NOT_FOUND, 404, "notfound")):
        scene.outcome = RevokeDone(0, outcome)
        done = deleted(rig)
        assert (done.status_code, done.json()["outcome"]) == (status, word)
    scene.outcome = RequestDenied(0, invalid("It makes no sense.", "Ask otherwise."))
    done = deleted(rig)
    assert (done.status_code, done.text) == (409, "It makes no sense. Ask otherwise.")


def test_an_action_that_fails_is_answered_at_once(rig: WebRig, scene: Scene) -> None:
    def fail(lease_id: int, reason: str, on_outcome: object) -> None:
        raise ZeroDivisionError

    scene.revoke = fail  # type: ignore[method-assign]
    done = deleted(rig)
    assert (done.status_code, "failed while handling this request" in done.text) == (500, True)


@pytest.mark.exhaustive
def test_nobody_else_does(rig: WebRig, scene: Scene) -> None:
    for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": f"token={TOKEN}"}):
        answer = deleted(rig, headers=wrong)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    for foreign in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        assert deleted(rig, headers=BEARER | foreign).status_code == 403
    assert deleted(rig, headers=BEARER | {"Host": "evil.example"}).status_code == 421
    for nothing in ("1", "g" * 32, ONE + "%0a", ONE + "%2f"):
        assert deleted(rig, nothing).status_code in (400, 404)
    assert deleted(rig, reason="x" * 513).status_code == 400
    assert asked(rig, f"api/v1/leases/{ONE}", BEARER).status_code == 405
    assert (scene.revoked, scene.refusals) == ([], []), "none of it came to the broker"


def acted(rig: WebRig, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    headers = BEARER if headers is None else headers
    return httpx.request(method, f"{rig.url}api/v1/{path}", headers=headers, timeout=60, trust_env=False, verify=False)


@pytest.mark.exhaustive
def test_an_operator_drains_and_clears_fences(rig: WebRig, scene: Scene) -> None:
    listening = acted(rig, "PUT", "drain?within_s=90.5").json()
    assert (listening["draining"], listening["leases"]) == (True, 2)
    assert 0 < listening["left_s"] <= 90.5
    assert acted(rig, "DELETE", "drain").json() == {"draining": False, "left_s": None, "leases": 2}
    assert acted(rig, "DELETE", "fences/GPU-1").json() == {"card": "GPU-1", "cleared": 2}
    assert acted(rig, "PUT", "drain/GPU-1?within_s=60").json()["draining"]
    assert not acted(rig, "DELETE", "drain/GPU-1").json()["draining"]
    done = ([90_500, None, ("GPU-1", 60_000), ("GPU-1", None)], ["GPU-1"])
    for nothing in ("drain", "drain?within_s=", "drain?within_s=-1", "drain?within_s=1e3", "drain?within_s=9999999"):
        assert acted(rig, "PUT", nothing).status_code == 400
    for path in ("fences/GPU_1", "drain/GPU_1"):
        assert acted(rig, "DELETE", path).status_code == 400
    for method, path in (("PUT", "drain?within_s=1"), ("DELETE", "drain/GPU-1"), ("DELETE", "fences/GPU-1")):
        for wrong in ({}, {"Authorization": "Bearer x"}):
            assert acted(rig, method, path, wrong).status_code == 401
        assert acted(rig, method, path, BEARER | {"Origin": "http://evil.example"}).status_code == 403
    assert (scene.drained, scene.cleared) == done, "no more came to the broker"


@pytest.mark.exhaustive
def test_the_cards_last_hour_is_told_and_outlives_the_process(rig: WebRig, scene: Scene) -> None:
    def known() -> list[Any]:
        with suppress(httpx.TransportError):
            cards = asked(rig, "api/v1/history").json()["cards"]
            return [] if CARD not in cards else [cards[CARD]["utilization_percent"], cards[CARD]["used_bytes"]]
        return []

    now_ns = time.monotonic_ns()
    # As a sample that was taken while the process started, and then the history with it in it.
    rig.notify_page(CardLoads(CARD, (LoadSample(now_ns, None, GIB, GIB),)))
    scene.loads = [
        CardLoads(
            CARD,
            (
                LoadSample(now_ns - 10**9, 40, 2 * GIB, GIB),
                LoadSample(now_ns, None, GIB, GIB),
            ),
        )
    ]
    wait_until(lambda: known() == [[None], [GIB]], "the sample is told", seen=known)
    os.kill(rig.process_id, signal.SIGKILL)
    wait_until(lambda: known() == [[40, None], [2 * GIB, GIB]], "the next process knows all", seen=known)
    assert asked(rig, "api/v1/history", {"Authorization": "Bearer x"}).status_code == 401


@pytest.mark.exhaustive
def test_another_token_counts_from_when_it_is_read(rig: WebRig, scene: Scene) -> None:
    other = {"Authorization": f"Bearer {TOKEN[::-1]}"}
    with httpx.stream(
        "GET", rig.url + "api/v1/events", headers=BEARER, timeout=60, trust_env=False, verify=False
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        rig.change_token(TOKEN[::-1])
        wait_until(lambda: asked(rig, "api/v1/state", other).status_code == 200, "the process knows it")
        assert [asked(rig, path, BEARER).status_code for path in ("api/v1/state", "metrics")] == [401, 401]
        assert [deleted(rig, headers=of).status_code for of in (BEARER, other)] == [401, 200]
        # What was begun by the one before ends, and the page asks anew.
        assert sum(1 for _ in lines) < 10_000
    assert len(scene.revoked) == 1
    os.kill(rig.process_id, signal.SIGKILL)
    wait_until(lambda: is_asked(rig, other), "the next process is given it, too")


def is_asked(rig: WebRig, headers: dict[str, str]) -> bool:
    with suppress(httpx.TransportError):
        return asked(rig, "api/v1/state", headers).status_code == 200
    return False


NASTY = (
    b"\0" * 4096,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff%2e%2e/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /page.css%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%0A HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET //../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[:::]/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /api/v1/state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /api/v1/state HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    # Whole, and then no HTTP, in one packet: the server has answered before it comes to the request.
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500,
    b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n\0\0\0",
    b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 4000 + b"\r\n",
)


@pytest.mark.exhaustive
def test_what_is_no_request(capfd: pytest.CaptureFixture[str], scene: Scene) -> None:
    with WebRig(scene) as rig:  # within what is captured
        where, pid = httpx.URL(rig.url), rig.process_id
        for data in NASTY:
            with socket.create_connection((where.host, where.port or 0), timeout=60) as sock, suppress(ConnectionError):
                sock.sendall(data)
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 ")
        assert asked(rig, "healthz").text == "ok\n"
        assert rig.process_id == pid
    said = capfd.readouterr()
    assert said.out + said.err == "", "a peer fills no log"


def test_it_is_shut_in(rig: WebRig) -> None:
    status = Path(f"/proc/{rig.process_id}/status").read_text()
    found = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert found["Name"] == "gpul-web"
    assert found["NoNewPrivs"] == "1"
    assert int(found["CapEff"], 16) == 0
    if os.geteuid() == 0:
        assert found["Uid"].split() == [found["Uid"].split()[0]] * 4
        assert int(found["Uid"].split()[0]) != 0
    if os.uname().machine == "x86_64":
        assert found["Seccomp"] == "2"


@pytest.mark.exhaustive
def test_one_that_dies_is_started_anew_and_nobody_is_renamed(rig: WebRig) -> None:
    before = asked(rig, "api/v1/state")
    pid = rig.process_id
    waiting = threading.Thread(target=lambda: found.append(asked(rig, "api/v1/state")))
    found: list[httpx.Response] = []
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: name_of(pid) != "gpul-web", "it is gone")
    # Who asks meanwhile waits: the socket is the broker's.
    waiting.start()
    waiting.join()
    assert tenants(found[0]) == tenants(before)
    assert rig.process_id != pid


@pytest.mark.exhaustive
def test_one_that_hangs_is_noticed_and_started_anew(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with WebRig(scene, patience=replace(ordinary_timeouts(), beat_s=0.2, hung_after_s=6)) as rig:
        pid = rig.process_id
        stop_process(pid)
        # Who asks meanwhile waits: the socket is the broker's.
        assert asked(rig, "healthz").text == "ok\n"
        assert rig.process_id != pid
    told = [getattr(record, ATTRIBUTE) for record in caplog.records]
    assert told[0] == ("web.hung", {"reason": "it gave no sign of life for 6 s"})
