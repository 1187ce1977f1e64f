"""Texts of a hostile daemon reach neither a shell's line nor a terminal unescaped."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.client.transport.link import NOT_FOLLOWED_HINT
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.connection import Connection, Request, Role
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, DrainStatus, HelloReply, Inventory, Metrics, Report
from gpulease.protocol.opcodes import Opcode
from helpers.daemon import python_environment
from helpers.web_rig import card, lease

INSTALLED = [sys.executable, "-P", "-c", "from gpulease.entry_points import gpulease; gpulease()"]
IDS = ("$(touch${IFS}pwned)", "a\nplain,--reason", "--help", "*", "0" * 31, "0" * 33, "0" * 32 + "\n", "")
OBEYED = "\x1b[2J\x1b]0;title\x07"
FENCED = [lease(8, OBEYED, lease_id=OBEYED, state="fenced")]

ANSWERS: dict[Opcode, Body | bytes] = {
    Opcode.HELLO: HelloReply(0, "gpuleased", MAX_PAYLOAD_BYTES, ()),
    Opcode.LEASE_LIST_ACTIVE: Report(
        [lease(1, "ann", lease_id=text) for text in IDS] + [lease(7, "ann\x1b[2J")] + FENCED
    ),
    Opcode.DRAIN: DrainStatus(0, 0),
    Opcode.GET_INVENTORY: Inventory((), [card(name=OBEYED, drain_left_ms=0)]),
    Opcode.METRICS: Metrics("text/plain", f"# HELP up {OBEYED}\nup 1\n"),
}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a command whose daemon answers one connection after the other with the above."""

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                connection = Connection(Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES)
                while data := peer.recv(1 << 16):
                    connection.receive_data(data)
                    while isinstance(event := connection.next_event(), Request):
                        answer = ANSWERS[event.op]
                        if not isinstance(answer, bytes):
                            answer = connection.send_reply(event, answer)
                        peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "node"))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield python_environment() | {ADDRESS_VARIABLE: f"unix:{tmp_path}/node"}
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_ids_of_leases_alone(environment: dict[str, str], shell: str) -> None:
    # fish says there what was typed, the others at which word.
    words = {"COMP_WORDS": "gpulease revoke ", "COMP_CWORD": "" if shell == "fish" else "2"}
    words["_GPULEASE_COMPLETE"] = f"{shell}_complete"
    for _ in range(5):
        done = subprocess.run(
            INSTALLED, env=environment | words, capture_output=True, text=True, timeout=60, check=True
        )
        # On a busy host the half second that a completion takes at most may be over before the daemon has answered.
        if done.stdout.strip():
            break
    assert f"{7:032x}" in done.stdout
    assert len(done.stdout.splitlines()) == {"bash": 1, "zsh": 3, "fish": 1}[shell]
    assert "\x1b" not in done.stdout


def assert_escaped(environment: dict[str, str], *words: str) -> None:
    """On a terminal."""
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as screen:
        with open(theirs, "wb") as output:
            subprocess.run([*INSTALLED, *words], env=environment, stdout=output, stderr=output, timeout=60)
        shown = screen.read(1 << 16)
    assert b"\\x1b[2J\\x1b]0;title\\x07" in shown
    assert b"\x1b" not in shown


@pytest.mark.parametrize("words", [("leases",), ("info",), ("drain", "--wait")], ids=" ".join)
def test_what_is_said_is_shown_escaped(
    environment: dict[str, str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--wait" in words:
        monkeypatch.setitem(ANSWERS, Opcode.LEASE_LIST_ACTIVE, Report(FENCED))
    assert_escaped(environment, *words)


GOOD_CARD, GOOD_LEASE = card(), lease(9, "ann")


def without(found: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in found.items() if name != key}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "answer", "said"),
    [
        ("leases", Report("none"), "the daemon's answer is not a list of leases"),
        ("leases", Report([GOOD_LEASE, [1]]), "lease 2 of the daemon's answer is not a map"),
        ("leases", Report([without(GOOD_LEASE, "tenant")]), "lease 1 of the daemon's answer lacks tenant"),
        ("leases", Report([GOOD_LEASE | {"size_bytes": "1"}]), "size_bytes of lease 1 of the daemon's answer is not a"),
        ("leases", Report([GOOD_LEASE | {"remaining_ms": float("nan")}]), "remaining_ms of lease 1"),
        ("leases", Report([GOOD_LEASE | {"launches": True}]), "launches of lease 1"),
        ("leases --json", Report([b"bytes"]), "can't be written as JSON"),
        ("leases --json", Report([float("inf")]), "can't be written as JSON"),
        ("info", Inventory((), {}), "the daemon's answer is not a list of cards"),
        ("info", Inventory((), [GOOD_CARD | {"capacity_bytes": None}]), "capacity_bytes of card 1"),
        ("info", Inventory((), [without(GOOD_CARD, "uuid")]), "card 1 of the daemon's answer lacks uuid"),
        ("info", Inventory((), [GOOD_CARD | {"sandbox": [{"on": True}]}]), "measure of the sandbox 1"),
        ("drain --wait", Report([{}]), "lease 1 of the daemon's answer lacks lease_id"),
        ("health", Report({"ready": True}), "the daemon's answer lacks checks"),
        ("health", Report({"ready": 1, "checks": []}), "ready of the daemon's answer is not true or false"),
        ("demo", Inventory((), []), "the daemon's answer contains no card"),
    ],
)
def test_what_makes_no_sense_is_told_as_the_daemons(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: str, answer: Body, said: str
) -> None:
    op = {"info": Opcode.GET_INVENTORY, "demo": Opcode.GET_INVENTORY, "health": Opcode.HEALTH}.get(words.split()[0])
    monkeypatch.setitem(ANSWERS, op or Opcode.LEASE_LIST_ACTIVE, answer)
    done = subprocess.run([*INSTALLED, *words.split()], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done
    assert done.stderr.startswith("gpulease: MalformedReport: ")
    assert said in done.stderr
    assert "versions differ?" in done.stderr
    assert "itself" not in done.stderr


@pytest.mark.parametrize("op", [Opcode.HELLO, Opcode.LEASE_LIST_ACTIVE])
def test_what_is_no_answer_at_all(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, op: Opcode) -> None:
    monkeypatch.setitem(ANSWERS, op, b"421 Misunderstood\r\n" * 4)
    done = subprocess.run([*INSTALLED, "leases"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert "sent something invalid" in done.stderr
    assert NOT_FOLLOWED_HINT in done.stderr


def test_older_daemons_are_understood(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Older daemons lack keys that were added since."""
    old_lease = {key: GOOD_LEASE[key] for key in ("lease_id", "tenant", "state", "cause", "size_bytes", "remaining_ms")}
    keys = ("uuid", "name", "driver", "index", "capacity_bytes", "available_bytes", "fenced_bytes", "leases")
    old_card = {key: GOOD_CARD[key] for key in (*keys, "exclusive")}
    monkeypatch.setitem(ANSWERS, Opcode.LEASE_LIST_ACTIVE, Report([old_lease]))
    monkeypatch.setitem(ANSWERS, Opcode.GET_INVENTORY, Inventory((), [old_card]))
    for word, shown in (("leases", "ann"), ("info", "H100")):
        done = subprocess.run([*INSTALLED, word], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert shown in done.stdout


def test_metrics_do_not_reach_a_terminal_as_they_are(environment: dict[str, str]) -> None:
    assert_escaped(environment, "metrics")
    piped = subprocess.run([*INSTALLED, "metrics"], env=environment, capture_output=True, timeout=60, check=True)
    assert piped.stdout.endswith(b"\nup 1\n")
