"""`gpulease run`: a real program on a real lease, and every way in which either of them ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import GpuSession, InvalidRequest
from gpulease.client.cli.run import EXIT_LEASE_ENDED, EXIT_NO_PROGRAM, EXIT_NOT_STARTED, GIVE_BACK_S, ORPHAN_S
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import lease_id_of
from gpulease.protocol.messages import LeaseRevoke
from helpers.daemon import Daemon, python_environment
from helpers.lasting import LastingDaemon
from helpers.processes import stop_process
from helpers.waiting import wait_until

LIMIT_S = 120
COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "from gpulease.entry_points import gpulease; gpulease()",
    "run",
    "--vram",
    "1MiB",
]
ATTACH = """
import os
from gpulease.client import GpuSession
with GpuSession.attach() as session:
    buffer = session.mem_alloc(4)
    session.mem_write(buffer, 0, b"four")
    print(os.environ["GPULEASE_LEASE_ID"], session.lease.lease_id, session.mem_read(buffer, 0, 4).decode())
"""
TELL_ID = "import os, time, sys; print(os.environ['GPULEASE_LEASE_ID'], flush=True); "
ENDLESS = TELL_ID + "time.sleep(1000)"
AWAIT_SIGNAL = (
    "import os, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7));"
    " print(os.environ['GPULEASE_LEASE_ID'], os.getpid(), flush=True); signal.pause()"
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(daemon: Daemon) -> Iterator[Start]:
    """Starts `gpulease run`; what is left of it at the end of the test is killed, and its program with it."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, address: str = daemon.address) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=python_environment() | {ADDRESS_VARIABLE: address},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def pending(pid: int) -> set[int]:
    """The signals that are sent to the process and not yet taken."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def cause_of_end(daemon: Daemon, lease_id: str) -> Any:
    return daemon.query(lease_id_of(lease_id))["cause"]


def test_a_program_attaches_in_one_line_and_its_lease_ends_with_it(start: Start, daemon: Daemon) -> None:
    said, complaint = (process := start("--", sys.executable, "-P", "-c", ATTACH)).communicate(timeout=LIMIT_S)
    assert (process.returncode, complaint) == (0, "")
    named, attached, read = said.split()
    assert (named, read) == (attached, "four")
    assert cause_of_end(daemon, named) == "freed"


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -KILL $$", -signal.SIGKILL)])
def test_the_program_s_end_is_passed_on(start: Start, daemon: Daemon, script: str, status: int) -> None:
    said, _ = (process := start("sh", "-c", f"echo $GPULEASE_LEASE_ID; {script}")).communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert cause_of_end(daemon, said.strip()) == "freed"


def test_signals_are_passed_on(start: Start, daemon: Daemon) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5));"
        " signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True)); "
    )
    process = start(sys.executable, "-c", TELL_ID.partition("print")[0] + script + ENDLESS)
    assert process.stdout is not None
    lease_id = process.stdout.readline().strip()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 5
    assert cause_of_end(daemon, lease_id) == "freed"


def test_no_signal_in_the_midst_of_others_ends_it(start: Start, daemon: Daemon) -> None:
    numbers = sorted({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
    script = (
        f"import os, signal; heard = set(); numbers = {set(map(int, numbers))};"
        " hear = lambda number, _: (heard.add(number), heard == numbers and os.write(1, b'all\\n'));"
        " [signal.signal(number, hear) for number in numbers];"
        " signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); "
    )
    process = start("--", sys.executable, "-c", TELL_ID.partition("print")[0] + script + ENDLESS)
    assert process.stdout is not None
    lease_id = process.stdout.readline().strip()
    for number in numbers * 20:
        process.send_signal(number)
    wait_until(lambda: process.poll() is not None or not pending(process.pid) & {*numbers}, "it passed them on")
    assert process.stdout.readline() == "all\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 5
    assert cause_of_end(daemon, lease_id) == "freed"


def test_no_signal_ends_it_while_it_gives_the_lease_back(start: Start, daemon: Daemon) -> None:
    process = start("--", sys.executable, "-c", AWAIT_SIGNAL)
    assert process.stdout is not None
    lease_id, program = process.stdout.readline().split()
    stop_process(daemon.process.pid)
    try:
        os.kill(int(program), signal.SIGUSR1)
        wait_until(lambda: not os.path.exists(f"/proc/{program}"), "the program was waited for")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert process.wait(LIMIT_S) == 7
    assert cause_of_end(daemon, lease_id) == "freed"


def test_the_program_s_status_stands_when_the_daemon_is_gone(start: Start) -> None:
    gone = Daemon()
    try:
        gone.wait_until_it_answers()
        process = start("--", sys.executable, "-c", AWAIT_SIGNAL, address=gone.address)
        assert process.stdout is not None
        lease_id = process.stdout.readline().split()[0]
        gone.kill()
        process.send_signal(signal.SIGUSR1)
        _, complaint = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 7
        assert complaint.startswith(f"gpulease: lease {lease_id} was not freed: ")
        gone.check_nothing_is_left()
    finally:
        gone.discard()


def test_a_daemon_that_is_started_anew_finds_the_lease_held(start: Start, lasting: LastingDaemon) -> None:
    process = start("--", sys.executable, "-c", AWAIT_SIGNAL, address=lasting.address)
    assert process.stdout is not None
    lease_id = process.stdout.readline().split()[0]
    before_ms = lasting.now.query(lease_id_of(lease_id))["remaining_ms"]
    lasting.restart()

    def is_held() -> bool:
        return lasting.now.query(lease_id_of(lease_id))["orphaned_in_ms"] is None

    wait_until(is_held, "it has renewed its lease")
    assert lasting.now.query(lease_id_of(lease_id))["remaining_ms"] <= before_ms
    lasting.kill()
    process.send_signal(signal.SIGUSR1)
    _, complaint = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, complaint) == (
        7,
        f"gpulease: lease {lease_id} was not freed: its daemon did not answer within {GIVE_BACK_S:g} s\n",
    )
    lasting.start()
    lasting.now.revoke(lease_id_of(lease_id))


def listed(daemon: Daemon, lease_id: str) -> dict[str, Any]:
    """The lease in the list of all. A query by the lease's own tenant would count as its connection."""
    return next(lease for lease in daemon.leases() if lease["lease_id"] == lease_id)


def test_its_own_death_leaves_the_lease_to_the_program_s_sessions(start: Start, daemon: Daemon) -> None:
    process = start("--", sys.executable, "-c", AWAIT_SIGNAL)
    assert process.stdout is not None
    lease_id, program = process.stdout.readline().split()
    assert listed(daemon, lease_id)["orphaned_in_ms"] is None
    process.kill()
    wait_until(lambda: listed(daemon, lease_id)["orphaned_in_ms"] is not None, "nobody is connected to it")
    assert listed(daemon, lease_id)["orphan_ms"] == ORPHAN_S * 1000
    os.kill(int(program), signal.SIGUSR1)
    daemon.revoke(lease_id_of(lease_id))


def test_a_program_whose_lease_runs_out_is_ended(start: Start, daemon: Daemon) -> None:
    process = start("--for", "1s", "--", sys.executable, "-c", ENDLESS)
    said, complaint = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_LEASE_ENDED
    lease_id = said.strip()
    assert f"lease {lease_id} has ended" in complaint
    assert "SIGTERM" in complaint
    assert cause_of_end(daemon, lease_id) == "expired"


@pytest.mark.exhaustive
def test_a_program_whose_lease_is_revoked_is_killed_if_it_does_not_go(start: Start, daemon: Daemon) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('stays', flush=True)); "
    process = start("--", sys.executable, "-c", TELL_ID.partition("print")[0] + deaf + ENDLESS)
    assert process.stdout is not None
    lease_id = process.stdout.readline().strip()
    ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id_of(lease_id), "the card is needed"), daemon.address)
    said, complaint = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (EXIT_LEASE_ENDED, "stays\n")
    assert f"lease {lease_id} has ended (the card is needed)" in complaint


def test_programs_that_can_not_be_started_keep_no_lease(start: Start, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF, but no further")
    (tmp_path / "broken").chmod(0o755)
    (tmp_path / "data").touch(0o644)
    for program, status in (
        ("gpulease-no-such-program", EXIT_NO_PROGRAM),
        (f"{tmp_path}/none", EXIT_NO_PROGRAM),
        (f"{tmp_path}/data", EXIT_NOT_STARTED),
        (f"{tmp_path}/data/none", EXIT_NOT_STARTED),
        (f"{tmp_path}", EXIT_NOT_STARTED),
        (f"{tmp_path}/broken", EXIT_NOT_STARTED),
    ):
        process = start("--", program)
        _, complaint = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status
        assert complaint.startswith(f"gpulease: {program}: ")
    assert daemon.leases() == []


def test_what_makes_no_sense(start: Start) -> None:
    for words, said in (
        (["--vram", "much", "true"], "is not a size"),
        (["--for", "soon", "true"], "the time must be like 30s"),
        ([], "CMD"),
    ):
        _, complaint = (process := start(*words)).communicate(timeout=LIMIT_S)
        assert (process.returncode, said in complaint) == (2, True), complaint


def test_outside_of_it_there_is_no_lease_to_attach_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEASE_ID_VARIABLE, raising=False)
    with pytest.raises(InvalidRequest, match="neither GPULEASE_LEASE_ID nor GPULEASE_LEASES is set") as caught:
        GpuSession.attach()
    assert "gpulease run --vram 4GiB -- CMD" in str(caught.value)
    monkeypatch.setenv(LEASE_ID_VARIABLE, "4f090dbe")
    with pytest.raises(InvalidRequest, match="32 hexadecimal digits"):
        GpuSession.attach()
