"""A daemon that can't start reports the reason in one sentence.

Its exit status tells a service manager whether to retry.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import Denied, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.daemon.gpus.driver_choice import has_nvidia_driver
from gpulease.daemon.ptx.stream import THREADS_VARIABLE
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon, python_environment
from helpers.kernels import check_main_job


def start_in_vain(*arguments: str) -> tuple[int, str]:
    """Start a daemon that must fail. Returns its exit status and its error output."""
    command = [sys.executable, "-P", "-m", "gpulease.daemon", *arguments]
    ended = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr
    assert not ended.stdout
    return ended.returncode, ended.stderr


def check_sentence(said: str, expected: str) -> None:
    sentences = [line for line in said.splitlines() if not line.startswith("{")]
    assert len(sentences) == 1, said
    assert sentences[0].startswith("gpuleased: ")
    assert re.search(expected, sentences[0]), said


@pytest.mark.exhaustive
def test_a_second_daemon_on_the_same_socket(daemon: Daemon) -> None:
    status, said = start_in_vain("--listen", daemon.address, "--driver", "cpu")
    assert status == os.EX_UNAVAILABLE
    check_sentence(said, "another gpuleased listens on it")
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


@pytest.mark.exhaustive
def test_a_socket_left_by_a_crash_is_replaced(start_daemon: Callable[..., Daemon]) -> None:
    crashed = start_daemon()
    crashed.kill()
    crashed.check_nothing_is_left()
    assert crashed.socket_path.exists()
    again = start_daemon(folder=crashed.folder)
    assert again.address == crashed.address
    with again.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


@pytest.mark.exhaustive
def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    path.write_text("precious")
    status, said = start_in_vain("--listen", f"unix:{path}", "--driver", "cpu")
    assert status == os.EX_CONFIG
    check_sentence(said, "can't listen on .* a file that is not a socket has this path; move it")
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path], "no lock is left beside it"


@pytest.mark.exhaustive
def test_a_socket_where_a_folder_is(tmp_path: Path) -> None:
    (tmp_path / "d.sock").mkdir()
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu")
    assert status == os.EX_CONFIG
    check_sentence(said, "it is a folder; add a file name for the socket")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no/ne", "the folder .*/no of the state folder .* does not exist"),
        ("file/state", "can't be used: Not a directory"),
    ],
)
def test_a_state_folder_that_can_not_be_made(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "file").write_text("x")
    settings = tmp_path / "config.toml"
    settings.write_text(f'state = "{tmp_path}/{place}"\n')
    status, output = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_CONFIG
    check_sentence(output, said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "link"])
def test_a_file_where_the_folder_of_the_zygotes_is(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    make(tmp_path / "state" / "zygotes")
    settings = tmp_path / "config.toml"
    settings.write_text(f'state = "{tmp_path}/state"\n')
    status, output = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_CONFIG
    check_sentence(output, "state/zygotes must be a folder. Move away what has this path.")


@pytest.mark.parametrize(
    ("config", "check", "reason"),
    [
        (
            "[tenants.default]\ndevices = [0, 99]\n",
            "cards",
            "devices of 'default' contains '99'; the cards of this host",
        ),
        (
            '[limits]\npark_memory = "1000TiB"\n',
            "memory",
            "limits.park_memory is .*1024000.0 GiB.*, but this host's memory",
        ),
    ],
    ids=["a missing card", "more memory than the host has"],
)
def test_a_setting_for_what_the_host_lacks_now_is_only_reported(
    start_daemon: Callable[..., Daemon], config: str, check: str, reason: str
) -> None:
    daemon = start_daemon(config=config, log_format="json")
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
    health = ask(Opcode.HEALTH, Empty(), daemon.address).report
    (found,) = [entry for entry in health["checks"] if entry["check"] == check]
    assert (health["ready"], found["ok"]) == (True, True)
    assert re.search(reason, found["detail"])
    records = [json.loads(line) for line in daemon.log().splitlines()]
    (record,) = [record for record in records if record["event"] == "setting.beyond_host"]
    assert record["level"] == "warning"
    assert re.search(reason, record["reason"])


@pytest.mark.exhaustive
def test_one_that_can_not_start_leaves_nobody_waiting(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(f'state = "{tmp_path}/state"\n')
    # The call returns only once no process has the standard error open.
    status, said = start_in_vain("--listen", "tcp:192.0.2.1:0", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_CONFIG
    check_sentence(said, "only for loopback")
    assert not list((tmp_path / "state" / "zygotes").iterdir())


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's workers are another user")
def test_workers_who_are_nobody_that_is_there(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text('worker_user = "no-such-user"\n')
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_CONFIG
    check_sentence(said, "the user 'no-such-user' does not exist")
    assert "zygote died" not in said, "no session ended with it, and it will not be started again"


@pytest.mark.exhaustive
@pytest.mark.skipif(has_nvidia_driver(), reason="this host has an NVIDIA driver")
def test_cuda_without_a_driver(tmp_path: Path) -> None:
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cuda")
    assert status in (os.EX_OSERR, os.EX_CONFIG)
    check_sentence(said, r"libnvidia-ml.so.1 \(NVML\) is not installed. .*--driver cpu|the cuda driver needs")
    assert not (tmp_path / "d.sock").exists()


@pytest.mark.exhaustive
def test_bad_settings(tmp_path: Path) -> None:
    """One case is enough here. The settings' own tests show the others without a process for each."""
    path = tmp_path / "bad.toml"
    path.write_text("[limits]\nmax_tl_s = 5")
    status, output = start_in_vain("--config", str(path))
    assert status == os.EX_CONFIG
    check_sentence(output, "max_tl_s")


@pytest.mark.exhaustive
def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    status, said = start_in_vain("--config", str(tmp_path / "none.toml"))
    assert status == os.EX_CONFIG
    check_sentence(said, "No such file")


@pytest.mark.exhaustive
def test_a_path_too_long_for_a_socket() -> None:
    status, said = start_in_vain("--listen", "unix:/" + "x" * 200)
    assert status == os.EX_CONFIG
    check_sentence(said, "at most 107 bytes")


@pytest.mark.exhaustive
def test_a_state_folder_whose_path_is_too_long_for_sockets(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(f'state = "{tmp_path}/{"x" * 100}"\n')
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu", "--config", str(settings))
    assert status == os.EX_CONFIG
    check_sentence(said, "the path of state must have at most 85 bytes, because .* Choose a shorter path.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", ["0", "many"])
def test_a_number_of_threads_that_is_none(tmp_path: Path, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, number)
    status, said = start_in_vain("--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu")
    assert status == os.EX_CONFIG
    check_sentence(said, f"GPULEASE_CPU_THREADS must be a number of threads, not '{number}'. Set it to 1 or more")


@pytest.mark.exhaustive
def test_the_command_line_wins_over_the_file(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(vram=("3GiB",), config='vram = ["1GiB", "1GiB"]\nlisten = "unix:/nowhere/at/all"\n')
    assert [entry.capacity_bytes for entry in daemon.inventory().entries] == [3 << 30]


@pytest.mark.exhaustive
def test_limits_from_the_file_are_kept(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(config="[limits]\nmax_ttl_s = 100\nmax_leases_per_tenant = 2\n")
    with pytest.raises(Denied, match="max_ttl_s"):
        daemon.builder(seconds=101).acquire()
    leases = [daemon.builder().acquire() for _ in range(2)]
    with pytest.raises(Denied, match="max_leases_per_tenant"):
        daemon.builder().acquire()
    for lease in leases:
        lease.free()


@pytest.mark.exhaustive
def test_two_listeners_of_one_daemon(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tcp=True)
    assert daemon.tcp_address.startswith("tcp:127.0.0.1:")
    assert not daemon.tcp_address.endswith(":0")
    mode = daemon.socket_path.stat().st_mode & 0o777
    assert mode == 0o660
