import signal
import time

import pytest

from gpulease.daemon.supervisor.watchdog import interval_s
from helpers.processes import process_info
from helpers.service_manager import ServiceManager
from helpers.waiting import wait_until


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


def test_a_loop_that_goes_round_shows_it_and_one_that_is_stuck_does_not(manager: ServiceManager) -> None:
    manager.start_ready(watchdog_s=0.2)
    assert manager.process is not None
    pid = manager.process.pid
    manager.wait_for("WATCHDOG=1", times=3)
    manager.send(signal.SIGSTOP)
    wait_until(lambda: (info := process_info(pid)) is not None and info.state == "T", "it is stopped")
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


def test_without_being_asked_nothing_is_shown(manager: ServiceManager) -> None:
    manager.start_ready()
    assert manager.end() == 0
    assert "WATCHDOG=1" not in manager.said
