"""cuInit asked in a process of its own, of libraries that answer as broken hosts' do."""

import signal
from pathlib import Path

import pytest

from gpulease.daemon.gpus import cuinit
from gpulease.daemon.gpus.cuinit import CuInitResult, ask
from helpers.daemon import python_environment
from helpers.made_libraries import make, make_cuda


@pytest.fixture(autouse=True)
def _searched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ld.so(8) finds a test's libraries before the host's."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 100, 803, 999])
def test_it_answers(tmp_path: Path, number: int) -> None:
    make_cuda(tmp_path, f"return {number};")
    assert ask() == CuInitResult(number)


def test_it_dies(tmp_path: Path) -> None:
    make_cuda(tmp_path, "abort();")
    assert ask() == CuInitResult(None, f"it died of signal {signal.SIGABRT:d}")


def test_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cuda(tmp_path, "for (;;) pause();")
    monkeypatch.setattr(cuinit, "TIMEOUT_S", 0.5)
    assert ask() == CuInitResult(None, "it did not return within 0.5 s")


def test_it_ends_the_process(tmp_path: Path) -> None:
    make_cuda(tmp_path, "exit(3);")
    assert ask() == CuInitResult(None, "it exited with status 3, without output")


def test_a_library_without_it(tmp_path: Path) -> None:
    make(tmp_path, cuinit.LIBRARY, "int other(void) { return 0; }")
    answer = ask()
    assert answer.number is None
    assert "cuInit" in answer.reason


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / cuinit.LIBRARY).write_text("precious")
    answer = ask()
    assert answer.number is None
    assert answer.reason


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuinit, "LIBRARY", "libcuda-not-there.so.1")
    assert cuinit._call() == CuInitResult(None, "")
