"""The directory of cached code: entries are whole or absent, and another user's entry is never read."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.native import private_folder
from gpulease.daemon.native.private_folder import MAX_ENTRY_BYTES, PrivateFolder, open_for

KEY, OTHER = bytes([0xAB] * 32), bytes([1] * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one entry."""
    folder = tmp_path / "above" / "kept"
    PrivateFolder(folder).write(KEY, b"code")
    return folder


def test_what_is_written_is_read_again(folder: Path) -> None:
    assert PrivateFolder(folder).read(KEY) == b"code"
    assert PrivateFolder(folder).read(OTHER) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [entry.stat().st_mode & 0o777 for entry in folder.iterdir()] == [0o600]


def test_a_second_write_replaces_the_entry(folder: Path) -> None:
    PrivateFolder(folder).write(KEY, b"")
    assert PrivateFolder(folder).read(KEY) == b""


def test_a_small_entry_is_read_into_little_memory(folder: Path) -> None:
    tracemalloc.start()
    try:
        assert PrivateFolder(folder).read(KEY) == b"code"
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < MAX_ENTRY_BYTES // 16


def _entry(folder: Path) -> Path:
    return folder / KEY.hex()


def _flip_a_bit(folder: Path) -> None:
    data = bytearray(_entry(folder).read_bytes())
    data[-1] ^= 1
    _entry(folder).write_bytes(data)


def _swap_in_a_link(folder: Path) -> None:
    _entry(folder).rename(folder.parent / "elsewhere")
    _entry(folder).symlink_to(folder.parent / "elsewhere")


def _link_to_the_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def _make_a_pipe(folder: Path) -> None:
    _entry(folder).unlink()
    os.mkfifo(_entry(folder), 0o600)


SPOILT: dict[str, Callable[[Path], object]] = {
    "a changed byte": _flip_a_bit,
    "a short entry": lambda folder: os.truncate(_entry(folder), 33),
    "an empty entry": lambda folder: os.truncate(_entry(folder), 0),
    "a huge entry": lambda folder: os.truncate(_entry(folder), MAX_ENTRY_BYTES + 1),
    "another key's": lambda folder: _entry(folder).rename(folder / OTHER.hex()),
    "an entry others can write": lambda folder: _entry(folder).chmod(0o602),
    "an entry of another user": lambda folder: os.chown(_entry(folder), 12345, -1),
    "a link": _swap_in_a_link,
    "a pipe": _make_a_pipe,
    "a folder others can read": lambda folder: folder.chmod(0o750),
    "a folder of another user": lambda folder: os.chown(folder, 12345, -1),
    "a link to a folder": _link_to_the_folder,
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_entry_that_another_user_could_change_is_not_read(folder: Path, how: str) -> None:
    if "another user" in how and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    SPOILT[how](folder)
    assert PrivateFolder(folder).read(KEY) is None
    assert PrivateFolder(folder).read(OTHER) is None


def test_nothing_is_written_where_others_may_write(folder: Path) -> None:
    folder.chmod(0o770)
    PrivateFolder(folder).write(OTHER, b"more")
    assert len(list(folder.iterdir())) == 1


def test_a_directory_that_can_not_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keeper = PrivateFolder(tmp_path / "file" / "kept")
    keeper.write(KEY, b"code")
    assert keeper.read(KEY) is None


@pytest.mark.parametrize(("bound", "most"), [("MAX_CACHED_ENTRIES", 3), ("MAX_CACHED_BYTES", 3 * 132)])
def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    monkeypatch.setattr(private_folder, bound, most)
    keys = [bytes([n] * 32) for n in range(5)]
    for age, key in enumerate(keys):
        PrivateFolder(tmp_path / "kept").write(key, bytes(100))
        if key != keys[-1]:
            os.utime(tmp_path / "kept" / key.hex(), (age, age))
        PrivateFolder(tmp_path / "kept").read(keys[0])
    assert [PrivateFolder(tmp_path / "kept").read(key) is not None for key in keys] == [True, False, False, True, True]


def test_files_that_are_not_entries_are_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have chosen a home directory as the folder."""
    tmp_path.chmod(0o700)
    theirs = [tmp_path / name for name in ("thesis.tex", "0123", f"{KEY.hex()}.txt", KEY.hex().upper(), "drafts.new")]
    for path in theirs:
        path.write_bytes(bytes(1000))
        os.utime(path, (1, 1))
    draft = tmp_path / f"{bytes(8).hex()}.new"
    draft.touch()
    monkeypatch.setattr(private_folder, "MAX_CACHED_BYTES", 0)
    PrivateFolder(tmp_path).write(KEY, b"code")
    assert sorted(tmp_path.iterdir()) == sorted(theirs)


def test_too_large_an_entry_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "MAX_ENTRY_BYTES", 40)
    PrivateFolder(folder).write(OTHER, bytes(9))
    assert PrivateFolder(folder).read(OTHER) is None
    PrivateFolder(folder).write(OTHER, bytes(8))
    assert PrivateFolder(folder).read(OTHER) == bytes(8)


def test_an_open_directory_works_like_its_path(folder: Path) -> None:
    opened = open_for(os.geteuid(), folder)
    assert opened is not None
    assert PrivateFolder(opened).read(KEY) == b"code"
    PrivateFolder(opened).write(OTHER, b"more")
    assert PrivateFolder(folder).read(OTHER) == b"more"
    os.close(opened)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_for_another_user_is_only_theirs(tmp_path: Path) -> None:
    opened = open_for(65534, tmp_path / "theirs")
    assert opened is not None
    assert (tmp_path / "theirs").stat().st_uid == 65534
    assert PrivateFolder(opened).read(KEY) is None
    os.chown(tmp_path / "theirs", 1, -1)
    assert open_for(65534, tmp_path / "theirs") is None
    os.close(opened)


def test_a_link_instead_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert open_for(os.geteuid(), tmp_path / "link") is None
