"""Readings of the machine that the tests run on."""

import os
from pathlib import Path

import pytest

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.machine_readings import HOST_CLOCKS, MachineReadings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ptp").mkdir()
    return tmp_path


def host_clock(folder: Path, name: str) -> None:
    """List a PTP clock as the kernel does. Its device is a file, whose time can't be read."""
    (folder / "ptp" / "ptp0").mkdir()
    (folder / "ptp" / "ptp0" / "clock_name").write_text(f"{name}\n")
    (folder / "ptp0").touch()


def test_the_machine_s_own_clock_and_stolen_times_are_read() -> None:
    readings = MachineReadings()
    try:
        before_ns = boot_ns()
        reading = readings.read()
        assert before_ns <= reading.began_ns <= reading.ended_ns <= boot_ns()
        assert len(reading.stolen_ns) == os.sysconf("SC_NPROCESSORS_ONLN")
        assert os.sysconf("SC_CLK_TCK") == 100
    finally:
        readings.close()


def test_a_machine_that_shows_nothing_is_read_all_the_same(folder: Path) -> None:
    readings = MachineReadings(folder / "ptp", folder, folder / "no-stat")
    try:
        reading = readings.read()
        assert (reading.host_ns, reading.stolen_ns, reading.generation_changes) == (None, {}, 0)
    finally:
        readings.close()


@pytest.mark.parametrize(("name", "is_opened"), [(sorted(HOST_CLOCKS)[0], True), ("a network card", False)])
def test_only_a_hypervisor_s_clock_is_opened(folder: Path, name: str, is_opened: bool) -> None:
    host_clock(folder, name)
    readings = MachineReadings(folder / "ptp", folder, folder / "no-stat")
    try:
        opened = {os.readlink(f"/proc/self/fd/{fd}") for fd in readings.fds}
        assert (str(folder / "ptp0") in opened) == is_opened
        assert readings.read().host_ns is None
    finally:
        readings.close()
