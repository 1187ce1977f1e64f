import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.capabilities import keys
from gpulease.daemon.capabilities.keys import KeyFileBroken, load_or_make, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "token.key"


def test_made_once_for_the_owner_alone(path: Path) -> None:
    ring = load_or_make(path, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_or_make(path, 0)
    assert (again.node_id, again.signing) == (ring.node_id, ring.signing)
    assert os.listdir(path.parent) == [path.name]


def test_a_rotation_is_kept(path: Path) -> None:
    ring = load_or_make(path, 0)
    first = ring.signing.private
    ring.rotate(5)
    save(path, ring, 5)
    again = load_or_make(path, 6)
    assert [(key.number, key.private) for key in again.all(6)] == [(1, first), (2, ring.signing.private)]
    assert again.signing.number == 2


def test_after_a_restart_of_the_host_only_a_new_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load_or_make(path, 0)
    boot = path.with_name("boot")
    boot.write_text("another\n")
    monkeypatch.setattr(keys, "BOOT_ID", boot)
    for _ in range(2):
        again = load_or_make(path, 0)
        assert [key.number for key in again.all(0)] == [2]
    assert again.node_id == ring.node_id


@pytest.mark.parametrize(("make", "said"), [(Path.mkdir, "is a folder"), (os.mkfifo, "must be a file")])
def test_what_is_no_file(path: Path, make: Callable[[Path], None], said: str) -> None:
    make(path)
    with pytest.raises(KeyFileBroken, match=said):
        load_or_make(path, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node 00\nboot x\nkey 1 00\n",
        "key 1 " + "00" * 32 + "\n",
        "node " + "00" * 32 + "\nboot x\n",
        "node " + "00" * 32 + "\nboot x\nkey 1 " + "zz" * 32,
        "node " + "00" * 32 + "\nboot x\nkey 0 " + "00" * 32,
        # The words of a line have changed places.
        "node " + "00" * 32 + "\nboot x\nkey " + "1" * 64 + " 1",
        "node " + "00" * 32 + "\nboot x\n" + "11" * 32 + " 1 key",
        "node " + "00" * 32 + "\nboot x\nkey " + "z" * 64 + " 1",
        "node " + "00" * 32 + "\nboot x\n" + ("key 1 " + "00" * 32 + "\n") * 2,
        "node " + "00" * 32 + "\nboot x\n" + "x" * 5000,
        "\xff",
    ],
)
def test_a_broken_file_is_no_reason_for_a_new_key(path: Path, text: str) -> None:
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(
        KeyFileBroken, match=r"is damaged: .*; restore it, or move it away so that the daemon creates a new one"
    ) as caught:
        load_or_make(path, 0)
    assert not re.search("0000|zzzz|1111|unpack|base 10", str(caught.value)), (
        "no word of the file, and none of Python's"
    )
    assert path.read_text(encoding="latin-1") == text


def test_others_may_not_read_it(path: Path) -> None:
    load_or_make(path, 0)
    path.chmod(0o640)
    with pytest.raises(KeyFileBroken, match="0600"):
        load_or_make(path, 0)


def test_a_link_is_not_followed(path: Path) -> None:
    load_or_make(path, 0)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(KeyFileBroken, match="can't be read"):
        load_or_make(link, 0)
