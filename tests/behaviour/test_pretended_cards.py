"""A host without an NVIDIA driver, where nobody has requested emulated cards: everyone who uses it is warned."""

import logging
from collections.abc import Callable

import pytest

from gpulease.client.core import daemon_warnings
from gpulease.client.sync.driver import ask
from gpulease.daemon.gpus.driver_choice import EMULATION_WARNING, has_nvidia_driver
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon


@pytest.mark.skipif(has_nvidia_driver(), reason="this host has an NVIDIA driver")
def test_log_health_and_a_first_lease_warn(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_warnings, "_logged", set())
    daemon = start_daemon(driver="auto", vram=["64MiB"])
    (warning,) = [line for line in daemon.log().splitlines() if " WARNING " in line]
    assert f'reason="{EMULATION_WARNING}"' in warning
    report = ask(Opcode.HEALTH, Empty(), daemon.address).report
    assert report["ready"] is True
    assert next(check for check in report["checks"] if check["check"] == "cards") == {
        "check": "cards",
        "ok": True,
        "detail": EMULATION_WARNING,
    }
    for _ in range(2):
        daemon.builder().min_vram(1 << 20).acquire().free()
    assert caplog.record_tuples == [("gpulease", logging.WARNING, f"the daemon warns: {EMULATION_WARNING}")]


def test_who_asked_for_them_is_not_warned(
    start_daemon: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start_daemon(driver="cpu", vram=["64MiB"])
    assert "WARNING" not in daemon.log()
    daemon.builder().min_vram(1 << 20).acquire().free()
    assert caplog.records == []
