import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpulease.daemon.drivers.interface import Context, Driver, DriverError
from gpulease.daemon.ptx.driver import CpuDriver

FAULTS = Path(__file__).parents[3] / "vectors" / "gpu" / "faults.sm75.ptx"

ENDLESS = f"""
import sys, time
from pathlib import Path
from gpulease.daemon.ptx.driver import CpuDriver
context = CpuDriver().open_context("", 1 << 20)
kernel = context.module_load(Path({str(FAULTS)!r}).read_bytes()).kernels["endless"]
flag = context.mem_alloc(4)
context.launch(kernel, (1, 1, 1), (1, 1, 1), 0, flag.to_bytes(8, "little"), 1)
beats = 0
def poll():
    global beats
    beats += 1
    if beats == 20:
        print("spinning", flush=True)
        if "leave" in sys.argv:
            context.close()
            sys.exit(3)
context.sync(poll)
"""


def child(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ENDLESS, *arguments], stdout=subprocess.PIPE)


def test_satisfies_the_interface() -> None:
    driver: Driver = CpuDriver()
    assert driver.name == "cpu"
    context: Context = driver.open_context("GPU-0", 1 << 20)
    context.close()


def test_preload_starts_no_thread_and_can_be_repeated() -> None:
    before = threading.active_count()
    CpuDriver().preload()
    CpuDriver().preload()
    assert threading.active_count() == before


def test_a_slice_past_the_address_space_is_refused() -> None:
    with pytest.raises(DriverError):
        CpuDriver().open_context("", 1 << 60)


def test_an_endless_kernel_spins_until_its_process_is_killed() -> None:
    with child() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spinning\n"
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_a_process_can_leave_an_endless_kernel_behind() -> None:
    with child("leave") as process:
        assert process.wait(60) == 3
