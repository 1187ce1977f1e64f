"""`gpulease audit` passes its arguments to the module that reads logs, and its exit status back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from helpers.daemon import python_environment


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["-h"], 0, "Usage: gpulease audit [OPTIONS] COMMAND"),
        (["verify", "--head-file", "nowhere", "."], 66, "gpulease audit: the head nowhere does not exist"),
    ],
)
def test_words_and_status_are_handed_on(words: list[str], status: int, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "audit", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=python_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done


def test_without_a_daemon_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.client.cli.daemon_modules.AUDIT_MODULE", "gpulease.nothing.audit")
    done = CliRunner().invoke(main, ["audit", "verify", "x"])
    assert done.exit_code == 1
    assert "pip install '.[daemon]' in gpulease's repository" in done.output


def test_it_ends_as_every_command_does() -> None:
    command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "audit", "-h"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, env=python_environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (74, "gpulease: can't read or write: No space left on device\n")


def test_an_interrupt_while_it_imports_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("print(flush=True)\nimport time\ntime.sleep(60)")
    code = "from gpulease.client.cli.start import run_module_instead as run; run()"
    where = python_environment()
    where["PYTHONPATH"] = os.pathsep.join([str(tmp_path), where["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, "daemon", "gpulease.daemon.record.audit"],
        env=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT
