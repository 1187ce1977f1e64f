"""The fleet that a command starts for itself: real processes, and none of them left afterwards."""

import socket
import tempfile
from pathlib import Path

import pytest

from gpulease.client.console import private_fleet
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import SOCKET_NAME_BYTES, short_folder
from gpulease.client.console.private_fleet import GENERATION, etcd_program, leader_of, private_etcd
from gpulease.daemon.fleet.records import fleet_records
from gpulease.protocol.address import MAX_UNIX_PATH_BYTES
from helpers.etcd_cluster import need_etcd
from helpers.waiting import wait_until


def test_a_missing_etcd_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingPrerequisite, match="etcd is not installed: install it, for example with `apt"):
        etcd_program()


def test_the_key_of_a_fleet_s_generation_is_the_daemon_s() -> None:
    assert fleet_records.GENERATION == GENERATION


def test_a_folder_of_temporary_files_without_room_for_a_fleet_s_sockets_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = "/" + "x" * (MAX_UNIX_PATH_BYTES - SOCKET_NAME_BYTES - 1)
    monkeypatch.setattr(tempfile, "tempdir", longest)
    assert short_folder() == longest
    assert len(f"{longest}/gpulease-01234567/node-10/state/zygotes/01234567.sock") <= MAX_UNIX_PATH_BYTES
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    assert short_folder() == "/tmp"


def test_a_leader_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    need_etcd()
    with private_etcd(tmp_path / "etcd", 3) as members:
        first = leader_of(members)
        assert first is not None
        first.kill()
        second = wait_until(lambda: leader_of(members), "another member leads")
        assert second is not first
    assert all(member.process.poll() is not None for member in members)


def test_an_etcd_that_can_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_etcd()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(private_fleet, "_free_ports", lambda count: [port] * count)
        with pytest.raises(MissingPrerequisite, match="etcd does not start"), private_etcd(tmp_path / "etcd"):
            pass
