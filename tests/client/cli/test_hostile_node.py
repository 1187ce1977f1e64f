"""Daemons that mean harm: what they say reaches neither a shell's line nor a terminal as they said it."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.connection import Connection, Request, Role
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, DrainStatus, HelloReply, Inventory, Metrics, Report
from gpulease.protocol.opcodes import Opcode
from helpers.daemon import python_environment
from helpers.web_rig import card, lease

INSTALLED = [sys.executable, "-P", "-c", "from gpulease.client.cli.start import run; run()"]
IDS = ("$(touch${IFS}pwned)", "a\nplain,--reason", "--help", "*", "0" * 31, "0" * 33, "0" * 32 + "\n", "")
OBEYED = "\x1b[2J\x1b]0;title\x07"
FENCED = [lease(8, OBEYED, lease_id=OBEYED, state="fenced")]

ANSWERS: dict[Opcode, Body] = {
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
                        peer.sendall(connection.send_reply(event, ANSWERS[event.op]))

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


def test_metrics_do_not_reach_a_terminal_as_they_are(environment: dict[str, str]) -> None:
    assert_escaped(environment, "metrics")
    piped = subprocess.run([*INSTALLED, "metrics"], env=environment, capture_output=True, timeout=60, check=True)
    assert piped.stdout.endswith(b"\nup 1\n")
