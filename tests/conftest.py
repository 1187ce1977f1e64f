"""Fixtures every test may use, and the leak check that every test passes through."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from gpulease.client import GpuSession
from helpers.daemon import Daemon
from helpers.forms_met import FormsMet, is_whole
from helpers.kernels import Neighbour
from helpers.lasting import LastingDaemon
from helpers.leaks import Holdings, check_for_leaks

with suppress(ImportError):
    import uvloop

    # The first loop of a process opens a pipe for signals that libuv keeps until the process ends.
    uvloop.new_event_loop().close()


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it runs in the background with interrupts ignored, and each process would pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_whole(config):
        config.pluginmanager.register(FormsMet())


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: the collections behind each test need not go through it again and again.

    They look for what a test has left, and would take longer than most tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that this run has compiled are kept for its daemons and later tests, and nowhere else."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # What the processes of one run have in common.
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULEASE_CPU_CACHE", str(folder / "compiled"))
        yield


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """After each test this process has the descriptors, threads and children it had before."""
    before = Holdings()
    yield
    check_for_leaks(before)


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for all tests that leave it as they found it: a card of 6 GiB, a Unix socket and TCP."""
    daemon = Daemon(tcp=True)
    try:
        daemon.wait_until_it_answers()
    except BaseException:
        daemon.discard()
        raise
    yield daemon
    daemon.stop()


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The shared daemon; afterwards it must be idle again, with all its bytes free and nothing left open."""
    files = len(shared_daemon.open_files())
    yield shared_daemon
    shared_daemon.check_idle(files)


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    """Another tenant's session, whose results must be right all the while."""
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        neighbour.check()
        yield neighbour
        neighbour.check()


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """Starts daemons of the test's own, with `Daemon`'s arguments; each must stop in good order after the test."""
    with ExitStack() as stack:

        def start(**arguments: Any) -> Daemon:
            daemon = Daemon(**arguments)
            stack.callback(daemon.stop)
            daemon.wait_until_it_answers()
            return daemon

        yield start


@pytest.fixture
def start_lasting() -> Iterator[Callable[..., LastingDaemon]]:
    """Starts daemons whose leases outlive them, with `LastingDaemon`'s arguments; the last of each must stop well."""
    with ExitStack() as stack:

        def start(**arguments: Any) -> LastingDaemon:
            lasting = LastingDaemon(**arguments)
            stack.callback(lasting.stop)
            lasting.start()
            return lasting

        yield start
