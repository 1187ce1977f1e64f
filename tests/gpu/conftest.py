"""A daemon on the real cards. The tests are skipped only if there is no NVIDIA driver; with a broken one they fail."""

from collections.abc import Iterator

import pynvml
import pytest

from gpulease.daemon.gpus.driver_choice import has_nvidia_driver
from helpers.daemon import Daemon, running
from helpers.lasting import LastingDaemon
from helpers.nvml import Cards


@pytest.fixture(scope="session")
def _nvidia_driver() -> None:
    if not has_nvidia_driver():
        pytest.skip("this host has no NVIDIA driver")


@pytest.fixture(scope="session")
def cards(_nvidia_driver: None) -> Iterator[Cards]:
    """The cards that NVML reports to this process."""
    pynvml.nvmlInit()
    yield Cards()
    pynvml.nvmlShutdown()


@pytest.fixture(scope="session")
def cuda_daemon(_nvidia_driver: None) -> Iterator[Daemon]:
    """One daemon for all tests here. It leases at most 6 GiB of each card."""
    with running(Daemon(driver="cuda", vram=("6GiB",), tcp=True)) as daemon:
        yield daemon


@pytest.fixture
def daemon(cards: Cards, cuda_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon. After the test it must be idle again, and NVML must show that the cards' memory is free."""
    files = len(cuda_daemon.open_files())
    used = cards.used_bytes()
    yield cuda_daemon
    cuda_daemon.check_idle(files)
    cards.check_back_to(used)


@pytest.fixture
def lasting(cards: Cards) -> Iterator[LastingDaemon]:
    used = cards.used_bytes()
    lasting = LastingDaemon(driver="cuda", vram=())
    try:
        lasting.start()
        yield lasting
    except BaseException:
        print(lasting.logs())
        lasting.discard()
        raise
    lasting.stop()
    cards.check_back_to(used)
