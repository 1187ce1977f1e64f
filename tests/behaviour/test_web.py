"""The web page of a real daemon in a real browser, its health and metrics, and the requests that it refuses."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gpulease.client import GpuBuilder, GpuSession, Revoked
from gpulease.client.sync.driver import ask
from gpulease.daemon.broker.web_actions import BY_PAGE
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from helpers import audit_log
from helpers.browser import Browser, lacks_browser
from helpers.daemon import Daemon, python_environment
from helpers.free_ports import free_port
from helpers.kernels import check_main_job
from helpers.log_story import story_of
from helpers.waiting import wait_until
from helpers.web_rig import GIB, Scene, WebRig, card, lease

TOKEN = "0123456789abcdef0123456789ABCDEF"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
MARKUP = "return document.querySelectorAll('img:not([src=\"/icon.svg\"]), body script').length"
"""Counts elements that exist only if a user's text was interpreted as markup."""
RECONNECT_S = 120.0
"""Limit in seconds for a page that reconnects every five seconds, on a busy host."""

with_browser = pytest.mark.skipif(bool(lacks_browser()), reason=lacks_browser())


def token_file(folder: Path) -> Path:
    path = folder / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def settings(folder: Path, port: int = 0) -> str:
    return (
        f'http = "127.0.0.1:{port}"\nhttp_token_file = "{token_file(folder)}"\n'
        f'[tenant_of_uid]\n{os.geteuid()} = "ann"\n'
        "[limits.grace_ms]\nexpired = 0\n"
    )


def url_of(daemon: Daemon) -> str:
    def found() -> re.Match[str] | None:
        return re.search(r"serves its web page at (http[^\s\"]+)", daemon.log())

    return str(wait_until(found, "it says where", seen=daemon.log)[1])  # type: ignore[index]


def fetched(daemon: Daemon, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(url_of(daemon) + path, headers=headers, timeout=60, trust_env=False, verify=False)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def slices(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('.bar > button')].map(one => one.getAttribute('aria-label'))"
    return [str(text) for text in browser.run(script)]


@with_browser
def test_what_a_browser_shows(start_daemon: Callable[..., Daemon], browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    daemon = start_daemon(config=settings(tmp_path, port), tcp=True)
    browser.open(url_of(daemon))
    browser.wait_for("#status", "Live")
    assert browser.text("#totals") == "no leases"
    assert browser.text(".none") == "No leases."
    with daemon.builder(2 * GIB, seconds=120).acquire() as ours:
        short = GpuBuilder(daemon.tcp_address).min_vram(GIB).lease_secs(3).acquire()
        drawn = [{"T, 2 GiB, 0 B used, active", f"T, 1 GiB, 0 B used, {how}"} for how in ("active", "active, warned")]
        wait_until(
            lambda: {re.sub("^tenant [0-9a-f]{8}", "T", one) for one in slices(browser)} in drawn,
            "both slices are drawn",
            seen=lambda: browser.text("body"),
        )
        assert browser.text("#totals") == "2 leases of 2 tenants"
        left = browser.texts("td .seconds")[0]
        assert re.fullmatch(r"1 min \d\d s|[0-9.]+ s", left)
        wait_until(lambda: browser.texts("td .seconds")[0] != left, "the time runs down")
        wait_until(lambda: len(slices(browser)) == 1, "the short one is over", seen=lambda: browser.text("body"))
        browser.wait_for("#events", "expired")
        assert not short.is_alive
        del short
        assert "ann" not in browser.run("return document.body.innerText")
        assert f"{ours.lease_id:032x}" not in browser.run("return document.documentElement.outerHTML")
        show_names(browser)
        browser.wait_for("tbody", "ann")
        assert f"{ours.lease_id:032x}"[:8] in browser.text("tbody")
        assert browser.run("return document.querySelector('.id .copy').dataset.copies") == f"{ours.lease_id:032x}"
        daemon.revoke(ours.lease_id, HOSTILE)
        browser.wait_for("#events", "onerror")
    wait_until(lambda: not slices(browser), "none is left", seen=lambda: browser.text("body"))
    assert HOSTILE in browser.text("#events"), "as text"
    assert browser.run(MARKUP) == 0
    told = [one for one in browser.texts("#events li") if "onerror" in one or "expired" in one]
    assert len(told) == 2, "an end is one event"
    assert browser.run("return document.title") == f"{os.uname().nodename} \u2013 gpuleased"
    assert browser.text("#host") == os.uname().nodename
    ask(Opcode.DRAIN, Drain(60_000), daemon.address)
    browser.wait_for("#drain-text", "This host is being drained")
    (refused,) = browser.complaints()
    assert "401" in refused, "the wrong token's"
    daemon.process.terminate()
    assert daemon.wait_for_exit() == 0
    browser.wait_for("#status", "No connection to the daemon")
    browser.wait_for("#since", "This page is")
    assert start_daemon(config=settings(tmp_path, port)).address != daemon.address
    browser.wait_for("#status", "Live", RECONNECT_S)
    assert browser.run("return document.getElementById('drain').hidden"), "this one is not drained"


def show_names(browser: Browser) -> None:
    """Show names with the keyboard only; enter a wrong token first."""
    browser.run("document.getElementById('names').focus()")
    wrong = "This is not the operator's token"
    for token, after in (("\u2011" * 32, f"{wrong}: it contains"), ("0" * 32, f"{wrong}."), (TOKEN, "")):
        if not browser.run("return document.getElementById('token-dialog').open"):
            browser.press("\ue007")
        wait_until(lambda: browser.run("return document.activeElement.id") == "token", "the token is asked for")
        browser.press(token + "\ue007")
        if after:
            browser.wait_for("#token-error", after)
    browser.wait_for("#names", "Sign out")
    assert not browser.run("return document.querySelector('dialog[open]')"), "Enter leaves no dialog standing"


@pytest.mark.exhaustive
@with_browser
def test_an_operator_revokes_by_the_page(start_daemon: Callable[..., Daemon], browser: Browser, tmp_path: Path) -> None:
    daemon = start_daemon(config=settings(tmp_path), log_format="json")
    browser.open(url_of(daemon))
    browser.wait_for("#status", "Live")
    with daemon.builder(2 * GIB, seconds=120).acquire() as ours, daemon.builder(GIB, seconds=120).acquire() as other:
        wait_until(lambda: len(slices(browser)) == 2, "both slices are drawn", seen=lambda: browser.text("body"))
        shown = "return [...document.querySelectorAll('.revoke')].filter(one => one.checkVisibility()).length"
        assert browser.run(shown) == 0, "whoever looks has nothing to press"
        show_names(browser)
        wait_until(lambda: browser.run(shown) == 2, "an operator has")
        browser.run(press_revoke(ours.lease_id))
        said = browser.text("#act-dialog")
        assert all(part in said for part in (f"{ours.lease_id:032x}", "ann", "2 GiB"))
        browser.press("\ue007")
        wait_until(lambda: not browser.run("return document.getElementById('act-dialog').open"), "Enter is Cancel")
        assert all(one["state"] == "active" for one in daemon.leases())
        browser.run(press_revoke(ours.lease_id))
        browser.run("document.getElementById('act-input').focus()")
        browser.press(HOSTILE + "\ue004\ue004")
        assert browser.run("return document.activeElement.id") == "act-do"
        browser.press("\ue007")
        browser.wait_for("#act-told", "ended, and its memory is free")
        browser.press("\ue007")
        wait_until(lambda: len(slices(browser)) == 1, "it is gone", seen=lambda: browser.text("body"))
        with pytest.raises(Revoked, match="<script>"):
            ours.renew(60)
        # A lease that has ended meanwhile is reported as ended.
        browser.run(press_revoke(other.lease_id))
        other.free()
        browser.run("document.getElementById('act-do').click()")
        wait_until(lambda: browser.text("#act-told") not in ("", "In progress …"), "it is told")
        assert browser.run("return document.title") != "taken"
    (acted,) = [record for record in story_of(daemon.log(), ours.lease_id) if record["event"] == "operator.acted"]
    assert [acted[name] for name in ("action", "by", "outcome", "reason")] == ["revoke", BY_PAGE, "torn_down", HOSTILE]
    assert not [message for message in browser.complaints() if "401" not in message and "404" not in message]


def press_revoke(lease_id: int) -> str:
    row = f"document.querySelector('.copy[data-copies=\"{lease_id:032x}\"]').closest('tr')"
    return f"{row}.querySelector('.revoke').click()"


@pytest.mark.exhaustive
def test_a_lease_is_revoked_over_http_and_the_audit_log_says_so(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    daemon = start_daemon(config=audit_log.config(log) + settings(tmp_path))
    with daemon.builder().acquire() as held, GpuSession(held) as session:
        where = f"{url_of(daemon)}api/v1/leases/{held.lease_id:032x}"

        def deleted(headers: dict[str, str]) -> int:
            return httpx.delete(
                where, headers=headers, params={"reason": "why"}, timeout=60, trust_env=False
            ).status_code

        assert deleted({}) == 401
        assert deleted({"Authorization": f"Bearer {TOKEN[::-1]}"}) == 401
        assert deleted(BEARER | {"Origin": "http://evil.example"}) == 403
        check_main_job(session)
        assert deleted(BEARER) == 200
        with pytest.raises(Revoked, match="why"):
            session.sync()
    audit_log.stop(daemon)
    (acted,) = [one["data"] for one in audit_log.records(log) if one["kind"] == "operator"]
    assert [acted[name] for name in ("action", "by", "outcome", "reason")] == ["revoke", BY_PAGE, "torn_down", "why"]
    audit_log.check_whole(log)


@pytest.mark.exhaustive
@with_browser
def test_any_names_two_hundred_leases_and_silence(browser: Browser, tmp_path: Path) -> None:
    names = [HOSTILE, "\u202eevil", "a" * 64, "&lt;b&gt;", "{{x}}", "`${x}`", "__proto__", "constructor", "", "\0"]
    leases = [lease(number, names[number % len(names)], size_bytes=GIB // 4, age_ms=0) for number in range(1, 201)]
    leases[7] = lease(8, "ann", state="fenced", cause="revoked", size_bytes=GIB, remaining_ms=0)
    scene = Scene([card(held_bytes=60 * GIB, fenced_bytes=GIB, warm_bytes=GIB, warm_contexts=2)], leases)
    scene.cards[0]["name"] = HOSTILE
    with WebRig(scene, token_file(tmp_path)) as rig:
        browser.open(rig.url)
        browser.run("sessionStorage.setItem('gpulease-token', arguments[0])", TOKEN)
        browser.open(rig.url)
        wait_until(lambda: len(slices(browser)) == 200, "all are drawn", seen=lambda: browser.text("#status"))
        assert browser.text(".card h2 .name") == HOSTILE
        shown = browser.run("return [...document.querySelectorAll('tbody .tenant')].map(one => one.textContent)")
        assert set(shown) == {*names, "ann"}
        assert browser.run("return document.title") != "taken"
        assert browser.run(MARKUP) == 0
        assert browser.run("return document.querySelectorAll('.bar > .fenced, .bar > .warm').length") == 2
        wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.run(wide), "nothing hangs over the edge"
        # All slices of a card are one stop for the Tab key. The arrow keys move between them.
        assert browser.run("return document.querySelectorAll('.bar > button[tabindex=\"0\"]').length") == 1
        browser.run("document.querySelector('.bar > button[tabindex=\"0\"]').focus()")
        browser.press("\ue014\ue014")
        where = "return [...document.activeElement.parentElement.children].indexOf(document.activeElement)"
        assert browser.run(where) == 2
        assert browser.run("return document.querySelectorAll('tr.marked').length") == 1
        browser.press("\ue010\ue007")
        assert browser.run("return document.activeElement.tagName") == "TR"
        scene.is_silent = True
        browser.wait_for("#status", "The daemon does not answer.")
        assert browser.complaints() == []


@pytest.mark.exhaustive
def test_health_metrics_and_the_end_of_the_web_process(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(config=settings(tmp_path))
    with daemon.builder().acquire() as held, GpuSession(held) as session:
        check_main_job(session)
        assert fetched(daemon, "healthz").text == "ok\n"
        ready = fetched(daemon, "readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        named = fetched(daemon, "metrics", BEARER)
        assert 'tenant="ann"' in named.text
        assert named.headers["content-type"].startswith("text/plain; version=")
        hidden = fetched(daemon, "metrics").text
        assert 'tenant="ann"' not in hidden
        assert re.search(r'^gpu_lease_acquired_total\{.*tenant="tenant [0-9a-f]{8}"\} 1\.0$', hidden, re.MULTILINE)
        (web,) = [info for info in daemon.processes() if info.name == "gpul-web"]
        daemon.allowed_trouble.append("the web process died")
        os.kill(web.pid, signal.SIGKILL)
        check_main_job(session)
        wait_until(lambda: "the web process runs again" in daemon.log(), "it is started anew", seen=daemon.log)
        assert fetched(daemon, "api/v1/state", BEARER).json()["cards"][0]["slices"][0]["tenant"] == "ann"
        ask(Opcode.DRAIN, Drain(60_000), daemon.address)
        wait_until(lambda: fetched(daemon, "readyz").status_code == 503, "it says that it is drained")
        (failing,) = [one["check"] for one in fetched(daemon, "readyz").json()["checks"] if not one["ok"]]
        assert failing == "not_draining"
        assert fetched(daemon, "healthz").status_code == 200
        ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address)
    daemon.kill()  # The web process must end with it.


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "status", "said"),
    [
        ("0.0.0.0:9400", 78, "plain HTTP is only served there"),
        ("taken", 69, "Address already in use"),
        ("no token", 78, "http_token_file: .*: No such file"),
    ],
)
def test_what_it_does_not_start_with(tmp_path: Path, place: str, status: int, said: str) -> None:
    arguments = ["--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu", "--vram", "1GiB"]
    config = tmp_path / "c.toml"
    config.write_text(f'http_token_file = "{tmp_path}/nothing"\n' if place == "no token" else "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}" if place == "taken" else place
        where = "127.0.0.1:0" if place == "no token" else where
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gpulease.daemon", *arguments, "--http", where, "--config", str(config)],
            capture_output=True,
            text=True,
            timeout=60,
            env=python_environment(),
        )
    assert done.returncode == status, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("gpuleased: ")]
    assert re.search(said, sentence)
    assert "Traceback" not in done.stderr
