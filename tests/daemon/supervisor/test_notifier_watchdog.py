import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest

from gpulease.daemon.supervisor.notifier import Notifier, Watchdog, interval_s
from helpers.processes import stop_process
from helpers.service_manager import ServiceManager


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_PID": "7"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "9" * 30}, None),
    ],
)
def test_how_often(environment: dict[str, str], expected: float | None) -> None:
    assert interval_s(environment, 7) == expected
    assert environment == {}


def test_it_is_the_loop_that_feeds_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "n"))
        heard.setblocking(False)

        async def main() -> None:
            notifier = Notifier(str(tmp_path / "n"))
            watchdog = Watchdog(notifier, 0.02)
            watchdog.start()
            assert heard.recv(100) == b"WATCHDOG=1"
            time.sleep(0.1)  # noqa: ASYNC251  # The loop is stuck.
            with pytest.raises(BlockingIOError):
                heard.recv(100)
            await asyncio.get_running_loop().sock_recv(heard, 100)
            watchdog.stop()
            notifier.close()

        asyncio.run(main())


@pytest.mark.exhaustive
def test_a_loop_that_goes_round_shows_it_and_one_that_is_stuck_does_not(manager: ServiceManager) -> None:
    manager.start_ready(watchdog_s=0.2)
    assert manager.process is not None
    pid = manager.process.pid
    manager.wait_for("WATCHDOG=1", times=3)
    stop_process(pid)
    manager.hear()
    fed = manager.said.count("WATCHDOG=1")
    time.sleep(0.5)
    manager.hear()
    assert manager.said.count("WATCHDOG=1") == fed
    manager.send(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1", times=fed + 1)
    # What a service manager does about it.
    assert manager.end(signal.SIGABRT) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in manager.log()
