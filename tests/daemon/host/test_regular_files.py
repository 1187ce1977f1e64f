"""Opening files that an operator names."""

import os
from pathlib import Path

import pytest

from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd.etcd_certificates import open_certificates
from gpulease.daemon.host.regular_files import open_regular


def test_a_regular_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"contents")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"contents"


def test_other_files_are_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    before = os.listdir("/proc/self/fd")
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="must be a regular file, not a folder, a FIFO or a device"):
            open_regular(path)
        with pytest.raises(BadEtcdSettings, match=f"{path}: it must be a regular file"):
            open_certificates({"ca": path})
    assert os.listdir("/proc/self/fd") == before
