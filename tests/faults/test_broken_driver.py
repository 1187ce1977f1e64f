"""Hosts with a broken NVIDIA driver: the daemon says what is wrong and what to do, and exits with a fitting status.

The driver's libraries are made for each test. They return what the real ones return on such a host.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease.daemon.gpus.driver_choice import has_nvidia_driver
from helpers.daemon import python_environment
from helpers.made_libraries import make_cuda, make_nvml
from helpers.waiting import wait_until

pytest.importorskip("pynvml")


def run(folder: Path, *command: str) -> "subprocess.Popen[str]":
    """Start a Python that finds the libraries in a folder before those of the host."""
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-P", *command],
            env=python_environment() | {"LD_LIBRARY_PATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )


def daemon_arguments(folder: Path) -> tuple[str, ...]:
    return "-m", "gpulease.daemon", "--driver", "cuda", "--listen", f"unix:{folder}/d.sock"


def ended(process: "subprocess.Popen[str]", folder: Path) -> tuple[int, str]:
    """Wait until a process has ended. Returns its exit status and the last line that it printed."""
    with process:
        process.wait(60)
    said = (folder / "said").read_text()
    assert "Traceback" not in said
    return process.returncode, said.splitlines()[-1]


def test_a_driver_that_was_updated_under_its_kernel_module(tmp_path: Path) -> None:
    make_nvml(tmp_path, 18)
    status, said = ended(run(tmp_path, *daemon_arguments(tmp_path)), tmp_path)
    assert status == os.EX_OSERR
    assert said.startswith("gpuleased: the NVIDIA kernel module")
    assert "have different versions. The driver was updated while the module was loaded: reboot" in said


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    make_nvml(tmp_path, 10, later=15, flag=flag)
    process = run(tmp_path, *daemon_arguments(tmp_path))
    said = tmp_path / "said"
    wait_until(lambda: "the driver did not answer in time; the daemon retries for 30 s" in said.read_text(), "it waits")
    flag.touch()
    status, last = ended(process, tmp_path)
    assert status == os.EX_OSERR
    assert last.startswith("gpuleased: the driver has lost a card. Reset it")


@pytest.mark.exhaustive
@pytest.mark.skipif(has_nvidia_driver(), reason="this host has an NVIDIA driver")
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 0;", 0, "None"),
        ("return 803;", os.EX_OSERR, "have different versions"),
        ("return 804;", os.EX_OSERR, "forward compatibility"),
        ("abort();", 69, "cuInit can't be called: it died of signal 6"),
    ],
)
def test_why_no_context_can_be_made(tmp_path: Path, body: str, status: int, said: str) -> None:
    make_nvml(tmp_path, 0)
    make_cuda(tmp_path, body)
    code = "from gpulease.daemon.gpus.nvidia import NvidiaCards; why = NvidiaCards().why_no_context();"
    code += "print(why, why.status if why else 0)"
    process = run(tmp_path, "-c", code)
    told, _ = process.communicate(timeout=60)
    assert said in told
    assert told.split()[-1] == str(status)
