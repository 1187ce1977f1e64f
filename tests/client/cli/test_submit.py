"""`gpulease submit` against a real daemon."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpulease.client.cli.__main__ import main
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM, numbers
from helpers.submits import check_scaled

SCALE = ("--grid", "4", "--block", "256,1", "--arg", "inout:x", "--arg", "u32:1000", "--arg", "f32:2")


def submit(daemon: Daemon, *words: str) -> Result:
    return CliRunner().invoke(main, ["submit", *words], env={ADDRESS_VARIABLE: daemon.address})


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_bytes(numbers(1000).tobytes())
    Path("k.ptx").write_bytes(TRANSFORM)


def test_outputs_go_to_files_or_are_printed(daemon: Daemon) -> None:
    done = submit(daemon, "scale", "k.ptx", *SCALE, "--output", "y")
    assert done.exit_code == 0, done.output
    check_scaled([Path("y").read_bytes()])
    done = submit(daemon, "scale", "k.ptx", *SCALE)
    check_scaled([done.stdout_bytes])


WRONG = {
    "no such kernel": (("nothing", "k.ptx"), 1, "LaunchFailed: submit: module 1 has no kernel 'nothing'"),
    "a grid that is none": (("scale", "k.ptx", "--grid", "4x"), 2, "it must be a list of numbers, not '4x'"),
    "an argument of no kind": (("scale", "k.ptx", "--arg", "x"), 2, "must be one of in, inout, out, u32"),
    "a number that is none": (("scale", "k.ptx", "--arg", "u32:x"), 2, "the value must be a number, not 'x'"),
    "a number too large": (("scale", "k.ptx", "--arg", "u32:4294967296"), 1, "must be a u32"),
    "a file that is not there": (("scale", "k.ptx", "--arg", "in:nowhere"), 74, "nowhere can't be read"),
    "a file too many": (
        ("scale", "k.ptx", *SCALE, "--output", "y", "--output", "z"),
        2,
        "--output is given 2 times, but the arguments have only 1 output: each inout and out is one",
    ),
}


@pytest.mark.parametrize(("words", "status", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_a_sentence(daemon: Daemon, words: tuple[str, ...], status: int, said: str) -> None:
    done = submit(daemon, *words)
    assert (done.exit_code, "Traceback" in done.output) == (status, False)
    assert said in done.output


@pytest.mark.parametrize(
    "word", ["a grid that is none", "an argument of no kind", "a file that is not there", "a file too many"]
)
def test_a_mistake_is_found_before_a_lease_is_acquired(word: str) -> None:
    words, status, said = WRONG[word]
    nowhere = {ADDRESS_VARIABLE: "unix:/no/daemon.sock"}
    done = CliRunner().invoke(main, ["submit", *words], env=nowhere)
    assert done.exit_code == status
    assert said in done.output
    assert not Path("y").exists()
