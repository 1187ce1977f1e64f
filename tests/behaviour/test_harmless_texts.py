"""Texts from other users are harmless to a reader, wherever they are shown."""

import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gpulease.client import GpuSession, Revoked
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers import audit_log
from helpers.daemon import Daemon, python_environment
from helpers.waiting import wait_until

HOSTILE = "BEGIN\x1b[2J\x1b]0;title\x07\r\n\0\x7f\x9b31m\u202e\u2066\u200b\u2028\U000e0041END"
"""Would clear a screen, set its title, forge a line, reverse a line's direction, and hide characters."""

TOKEN = "0123456789abcdef0123456789ABCDEF"
CLI = [sys.executable, "-P", "-c", "from gpulease.entry_points import gpulease; gpulease()"]


def said_by(daemon: Daemon, *words: str) -> str:
    environment = python_environment() | {ADDRESS_VARIABLE: daemon.address}
    done = subprocess.run([*CLI, *words], env=environment, capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def check_harmless(text: str) -> None:
    """Fail if a text has a character that a terminal executes, or that is invisible."""
    obeyed = [mark for mark in text if mark != "\n" and unicodedata.category(mark)[0] in "CZ" and mark != " "]
    assert not obeyed, ascii(text)
    assert "BEGIN" in text, text
    assert all("END" in line for line in text.splitlines() if "BEGIN" in line), "on one line"


def page_reason(daemon: Daemon) -> str:
    """Return the reason of the latest event that has one, from the data of the web page."""
    found = re.search(r"serves its web page at (http[^\s\"]+)", daemon.log())
    assert found, daemon.log()
    where, headers = f"{found[1]}api/v1/state", {"Authorization": f"Bearer {TOKEN}"}
    events = httpx.get(where, headers=headers, timeout=60, trust_env=False).json()["events"]
    return next((str(event["reason"]) for event in events if event["reason"]), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "audit"


SURFACES: dict[str, Callable[[Daemon, int, Path], str]] = {
    "events": lambda daemon, lease_id, _: said_by(daemon, "events", f"{lease_id:032x}"),
    "events --json": lambda daemon, lease_id, _: said_by(daemon, "events", "--json", f"{lease_id:032x}"),
    "log": lambda daemon, *_: "\n".join(line for line in daemon.log().splitlines() if "BEGIN" in line),
    "audit show": lambda daemon, _, folder: (
        audit_log.gpulease_audit("show", "--kind", "operator", "--kind", "over", "--kind", "end", folder).output
    ),
    "query": lambda daemon, lease_id, _: str(daemon.query(lease_id)["reason"]),
    "web page": lambda daemon, *_: page_reason(daemon),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_reason_is_shown_harmless_everywhere(
    start_daemon: Callable[..., Daemon], folder: Path, log_format: str
) -> None:
    token = folder.parent / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    page = f'http = "127.0.0.1:0"\nhttp_token_file = "{token}"\n'
    daemon = start_daemon(config=audit_log.config(folder) + page, log_format=log_format)
    lease = daemon.builder().acquire()
    with GpuSession(lease) as session:
        daemon.revoke(lease.lease_id, HOSTILE)
        with pytest.raises(Revoked) as told:
            session.sync()
    check_harmless(str(told.value))
    daemon.wait_for_end(lease.lease_id)
    wait_until(lambda: "operator" in audit_log.kinds(folder), "it is written down")
    for name, surface in SURFACES.items():
        text = wait_until(lambda show=surface: show(daemon, lease.lease_id, folder), name)  # type: ignore[misc]
        check_harmless(text)


@pytest.mark.parametrize("blank", ["", "  ", "\t\r\n", "\u3000\u2028"])
def test_a_blank_reason_is_none(daemon: Daemon, blank: str) -> None:
    lease = daemon.builder().acquire()
    with GpuSession(lease) as session:
        daemon.revoke(lease.lease_id, blank)
        with pytest.raises(Revoked, match=r"the lease was revoked\. |the lease was revoked$"):
            session.sync()
    daemon.wait_for_end(lease.lease_id)
    assert daemon.query(lease.lease_id)["reason"] == ""


def test_a_blank_reason_is_not_taken_from_a_terminal(daemon: Daemon) -> None:
    environment = python_environment() | {ADDRESS_VARIABLE: daemon.address}
    command = [*CLI, "revoke", "0" * 32, "--reason", " \t"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "it is blank; give a reason, or leave --reason out." in done.stderr


def test_json_is_ascii(daemon: Daemon) -> None:
    """JSON output is ASCII, so that a terminal executes nothing in it either."""
    with daemon.builder().acquire():
        text = said_by(daemon, "leases", "--json")
    assert text.isascii()
    assert json.loads(text)
