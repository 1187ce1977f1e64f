"""A server removes its own socket's file, and no other file that is at the path by then."""

import os
from pathlib import Path

from gpulease.client.http.unix_path import bound_to_path, remove_path


def test_a_server_s_own_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with bound_to_path(str(path)):
        remove_path(str(path))
        assert not path.exists()
    # A path without a file is no error.
    remove_path(str(path))


def test_a_file_that_took_the_socket_s_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with bound_to_path(str(path)):
        os.unlink(path)
        path.write_text("a user's")
        remove_path(str(path))
    assert path.read_text() == "a user's"
