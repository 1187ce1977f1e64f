"""However a command ends, it has a status that says why, prints a sentence at most, and never a traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import COMMANDS, main
from gpulease.client.console.exit_status import TRACEBACK_VARIABLE
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.waiting import wait_until

INSTALLED = "from gpulease.entry_points import gpulease; gpulease()"


def command_line(words: Sequence[str]) -> list[str]:
    """Return the command that the installed script runs."""
    return [sys.executable, "-P", "-c", INSTALLED, *words]


def environment(daemon: Daemon, **more: str) -> dict[str, str]:
    return python_environment() | {ADDRESS_VARIABLE: daemon.address} | more


def test_every_command_is_where_the_table_says() -> None:
    context = main.make_context("gpulease", ["info"])
    for name, (_, about) in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert 0 < len(about) < 70, name
    assert list(COMMANDS) == sorted(COMMANDS)


def test_help_imports_no_command() -> None:
    code = (
        # Python's start may have imported some already: numba's package has it do so.
        "import sys; before = set(sys.modules)\n"
        "from gpulease.client.cli.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'numpy', 'construct', 'gpulease.protocol', 'importlib.resources'}\n"
        "print(sorted(slow & (sys.modules.keys() - before)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=python_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "[]\n"
    assert "Show the cards" in done.stdout


def test_a_command_of_the_daemon_without_what_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "sys.argv[1:] = ['daemon', 'gpulease.daemon.remote.pki', 'init', 'none']\n"
        "from gpulease.entry_points import module_of_daemon as run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpulease: cryptography is not installed: pip install '.[daemon]' in gpulease's repository\n"


def test_listing_leases_imports_no_arrays(daemon: Daemon) -> None:
    code = (
        "import sys; from gpulease.client.cli.__main__ import main\n"
        "try: main(['leases'])\n"
        "except SystemExit: pass\n"
        "print('numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment(daemon), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("No leases.\n", "False\n")


def test_an_interrupt_while_a_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("print(flush=True)\nimport time\ntime.sleep(60)")
    where = python_environment()
    where["PYTHONPATH"] = os.pathsep.join([str(tmp_path), where["PYTHONPATH"]])
    with subprocess.Popen(
        command_line(["demo"]), env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_an_interrupt_of_a_command_that_waits(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        with subprocess.Popen(
            command_line(["events", lease.lease_id_text]),
            env=environment(daemon),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert lease.lease_id_text in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shell", "status", "said"),
    [
        ('"$@" >/dev/full', 74, "gpulease: can't read or write: No space left on device\n"),
        ('"$@" >&-', 0, ""),
        ('"$@" 2>&- >/dev/null', 0, ""),
        ('env -u HOME LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 "$@" >/dev/null', 0, ""),
        ('cd /tmp; GPULEASE_ADDRESS=unix:/tmp "$@"', 69, "folder, not a socket"),
        ('cd /tmp; GPULEASE_ADDRESS=unix:/etc/passwd "$@"', 69, "not a socket"),
        ('GPULEASE_ADDRESS=nonsense "$@"', 1, "'nonsense' is not an address"),
    ],
)
def test_where_output_goes_and_the_daemon_is_not(daemon: Daemon, shell: str, status: int, said: str) -> None:
    words = ["bash", "-c", shell, "bash", *command_line(["info"])]
    done = subprocess.run(words, env=environment(daemon), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(said) == bool(done.stderr), done.stderr


@pytest.mark.parametrize("words", [["metrics"], ["top", "--every", "0.1"]], ids=" ".join)
def test_there_is_no_output(daemon: Daemon, words: list[str]) -> None:
    command = ["bash", "-c", '"$@" >&-', "bash", *command_line(words)]
    done = subprocess.run(command, env=environment(daemon), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("words", [["info"], ["audit", "-h"]], ids=" ".join)
def test_nobody_reads_what_it_prints(daemon: Daemon, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command_line(words), env=environment(daemon), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_fault_of_its_own_is_a_sentence_too(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nobody\nforesaw \x1b[2J this")

    monkeypatch.setattr("gpulease.client.cli.node.ask", fail)
    done = CliRunner().invoke(main, ["leases"])
    assert done.exit_code == 70
    assert done.stderr.startswith(
        "gpulease: an internal error of gpulease: RuntimeError: nobody\nforesaw \\x1b[2J this."
    )
    done = CliRunner().invoke(main, ["leases"], env={TRACEBACK_VARIABLE: "1"})
    assert isinstance(done.exception, RuntimeError)


def test_an_argument_that_the_locale_cannot_read(daemon: Daemon) -> None:
    done = subprocess.run(
        command_line(["revoke", "1", "--json", "--reason", "für\x1b"]),
        env=environment(daemon, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpulease: 'f\\udcc3\\udcbcr\\x1b' can't be decoded in this locale\n"


def test_lease_ids_complete_from_the_daemon(daemon: Daemon) -> None:
    def completed(word: str) -> list[str]:
        words = {"_GPULEASE_COMPLETE": "bash_complete", "COMP_WORDS": f"gpulease revoke {word}", "COMP_CWORD": "2"}
        done = subprocess.run(
            command_line([]), env=environment(daemon, **words), capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    with daemon.builder().acquire() as lease:
        wait_until(lambda: completed("") == [f"plain,{lease.lease_id_text}"], "the lease's id is offered")
        begin = lease.lease_id_text[:5].upper()
        wait_until(lambda: completed(begin) == [f"plain,{lease.lease_id_text}"], "so it is by its begin")
        assert completed("x") == []


def test_completion_without_a_daemon_is_silent(tmp_path: Path) -> None:
    # One that takes connections and never says a word.
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "mute"))
        server.listen()
        where = python_environment() | {
            ADDRESS_VARIABLE: f"unix:{tmp_path}/mute",
            "_GPULEASE_COMPLETE": "zsh_complete",
            "COMP_WORDS": "gpulease events ",
            "COMP_CWORD": "2",
        }
        done = subprocess.run(command_line([]), env=where, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0, done.output
    assert f"_GPULEASE_COMPLETE={shell}_complete" in done.stdout
    assert CliRunner().invoke(main, ["completion", "csh"]).exit_code == 2
