"""Builds that are the same, and builds that differ."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.host.version import build_of


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], str]:
    sources, installed = tmp_path / "sources", tmp_path / "installed"
    (sources / "worker").mkdir(parents=True)
    (sources / "worker" / "loop.py").write_text("LIMIT = 1\n")
    (sources / "page.html").write_text("old")
    (installed / "numpy-2.4.5.dist-info").mkdir(parents=True)
    return lambda: build_of([sources], [installed, installed])


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte, and no size": lambda at: (at / "sources/worker/loop.py").write_text("LIMIT = 2\n"),
    "another file": lambda at: (at / "sources/worker/more.py").touch(),
    "another name": lambda at: (at / "sources/worker/loop.py").rename(at / "sources/loop.py"),
    "a library's version": lambda at: (at / "installed/numpy-2.4.5.dist-info").rename(
        at / "installed/numpy-2.4.6.dist-info"
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_makes_another(build: Callable[[], str], tmp_path: Path, what: str) -> None:
    before = build()
    CHANGES[what](tmp_path)
    assert build() != before


def test_what_does_not(build: Callable[[], str], tmp_path: Path) -> None:
    before = build()
    (tmp_path / "sources/page.html").write_text("new")
    (tmp_path / "sources/worker/loop.py").touch()
    assert build() == before
