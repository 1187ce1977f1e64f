from pathlib import Path

import pytest

from helpers.service_manager import ServiceManager

TOLD_TO_ONE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@pytest.mark.exhaustive
def test_a_life_is_told(manager: ServiceManager) -> None:
    manager.start_ready(watchdog_s=60)
    ready = manager.said.index("READY=1")
    assert "EXTEND_TIMEOUT_USEC=30000000" in manager.said[:ready]
    assert manager.said[ready + 1] == f"STATUS=Leasing; listens on {manager.address}."
    (zygote,) = [info for info in manager.processes() if info.name == "gpul-zygote"]
    variables = Path(f"/proc/{zygote.pid}/environ").read_bytes().split(b"\0")
    inherited = {entry.partition(b"=")[0].decode() for entry in variables}
    assert not inherited & set(TOLD_TO_ONE)
    assert manager.end() == 0
    assert [word for word in manager.said if word in ("READY=1", "STOPPING=1")] == ["READY=1", "STOPPING=1"]


@pytest.mark.exhaustive
def test_a_start_in_vain_is_never_ready(manager: ServiceManager) -> None:
    manager.start(config="max_load_s = 0\n")
    assert manager.wait_for_exit() == 78
    assert "READY=1" not in manager.said
    assert manager.said[-1] == "STATUS=max_load_s must be a whole number of at least 1, not 0"


@pytest.mark.exhaustive
def test_what_to_do_is_told_too(manager: ServiceManager) -> None:
    state = manager.folder / "state"
    state.mkdir(0o700)
    (state / "journal.db").write_bytes(b"no journal")
    manager.start(config=f'state = "{state}"\n')
    assert manager.wait_for_exit() == 65
    assert "journal.db" in manager.said[-1]
    assert ". Restore " in manager.said[-1]
