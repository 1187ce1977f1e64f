"""`gpulease audit` passes its arguments to the module that reads logs, and its exit status back."""

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
