"""Fixtures that every test may use, and the leak check that runs after every test."""

import faulthandler
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

# Let OpenBLAS use one thread. It ends its threads before a fork, and starts new ones at the next large product, so a
# test that multiplies after one that forks would seem to leak threads. Also, tests run concurrently, so no test may use
# all cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from gpulease.client import GpuLease, GpuSession
from gpulease.client.sync import idle_frees
from gpulease.daemon.ptx import stream
from gpulease.daemon.ptx.stream import THREADS_VARIABLE
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, Faults, lent, python_environment, running
from helpers.forms_met import FormsMet, is_whole
from helpers.kernels import Neighbour
from helpers.lasting import LastingDaemon, lent_lasting, stop_lasting
from helpers.leaks import Holdings, check_for_leaks
from helpers.waiting import PATIENCE_S

if TYPE_CHECKING:
    # Import these for mypy only: the packages that they need may be missing where no test uses these fixtures.
    from helpers.etcd_cluster import EtcdCluster
    from helpers.remote import Pki

# Without bytecode files, each process of this run would compile all tests, and each daemon would compile the product.
# That takes longer than the tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

with suppress(ImportError):
    import uvloop

    # The first event loop of a process opens a pipe for signals, which libuv keeps until the process ends. Open it
    # here, so that no test seems to leak it.
    uvloop.new_event_loop().close()


DEFAULT_MINUTES: Final = 8
EVERYTHING_MINUTES: Final = 20
BUSY_LOAD_PER_CORE: Final = 0.5
PROCESSES_PER_CORE: Final = 3
"""Test processes per core. Many tests wait for a deadline or for another process; meanwhile others run."""

DEFAULT_EXAMPLES: Final = 15
"""Examples of a property-based test that sets no `max_examples`. With --everything, it is hypothesis' own default."""

HANG_S: Final = 540.0
"""After this time in one test, the stacks of all threads are printed; pytest's limit can't end what hangs in C."""

REARM_S: Final = 30.0
"""A test's stacks may be printed earlier by up to this time."""

MOST_WAITING_PROCESSES: Final = 24
"""Limit of `-n auto` on hosts with fewer cores than this; each process first collects all tests, which takes time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="also run the tests marked `exhaustive`: sweeps, campaigns, kills at random moments, bounds in time",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    cores = len(os.sched_getaffinity(0))
    return max(cores, min(PROCESSES_PER_CORE * cores, MOST_WAITING_PROCESSES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Prepare the process that hands out the tests, and compile the tests of a fresh checkout.

    They are compiled once, before the test processes start; else each of them would do it.
    """
    # This process keeps all reports until the end, and garbage collections would go through them again and again. They
    # took a quarter of its time.
    gc.disable()
    folders = [Path(argument) for argument in config.args]
    compiled = f"__pycache__/test_*.{sys.implementation.cache_tag}-pytest-*.pyc"
    if not is_default(config) or any(any(folder.rglob(compiled)) for folder in folders):
        return
    paths = [str(path) for folder in folders for path in folder.rglob("test_*.py")]
    cores = min(len(os.sched_getaffinity(0)), len(paths))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    # Errors are not shown here: the test processes, which collect the same files next, report them.
    compilers = [
        subprocess.Popen([*collect, *paths[core::cores]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for core in range(cores)
    ]
    for compiler in compilers:
        compiler.wait()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let idle test processes take over tests that wait for another one: some files take much longer than others."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return what the run covers and how long it takes, with a warning if the host is busy."""
    if not is_default(config):
        return []
    lines = [
        f"gpulease: every subsystem by real processes and kernels: about {DEFAULT_MINUTES} minutes on two quiet cores",
        f"gpulease: --everything adds sweeps, campaigns, random kills: about {EVERYTHING_MINUTES} minutes in all",
    ]
    if config.option.everything:
        lines = [f"gpulease: everything, about {EVERYTHING_MINUTES} minutes on two quiet cores"]
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY_LOAD_PER_CORE * cores:
        lines.append(f"gpulease: this host is busy (load {load:.1f} on {cores} cores): expect it to take longer.")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select and order the tests.

    Tests marked `exhaustive` run only with --everything, or if the command line names files or tests. If a class
    derives from another test class and runs its test with more examples, only the derived one runs. Tests marked
    `first` begin first.
    """
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        names = getattr(item, "fixturenames", [])
        # Tests with these fixtures or names run the decode engine, so its kernels are compiled before them.
        if "stage" in names or ("decode" in item.nodeid and "shared_daemon" in names):
            names.insert(0, "_decode_kernels")
    if not is_default(config):
        return
    marks = ["slow"] if config.option.everything else ["slow", "exhaustive"]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    classes = {item: cls for item in items if (cls := getattr(item, "cls", None)) and item not in left_out}
    # A derived class runs its base's test with more examples, so the base is left out.
    bases = {base for cls in classes.values() for base in cls.__mro__[1:]}
    left_out |= {item for item, cls in classes.items() if cls in bases}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_default(config: pytest.Config) -> bool:
    """Whether the command line names only folders, and selects no tests by file, name or mark."""
    chosen = config.option
    names_files = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return not (names_files or chosen.markexpr or chosen.keyword or getattr(chosen, "lf", False))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what was exercised, one line for each subsystem."""
    count, seconds = Counter[str](), Counter[str]()
    for report in [report for kind in ("passed", "failed", "") for report in terminalreporter.getreports(kind)]:
        parts = report.nodeid.partition("::")[0].split("/")[1:-1]
        subsystem = "/".join(parts[: 2 if parts[:1] in (["daemon"], ["client"]) else 1]) or "the tree"
        count[subsystem] += report.when == "call"
        seconds[subsystem] += report.duration
    if len(count) > 1:
        terminalreporter.section("what was tried")
        for subsystem in sorted(count):
            terminalreporter.line(f"{subsystem:22} {count[subsystem]:6} tests {seconds[subsystem]:8.1f} s")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background commands with SIGINT ignored, and nohup starts them with SIGHUP ignored. The processes
    # that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # By default hypothesis fails an example that takes 0.2 s, and data generation that takes a second. On a busy host
    # any example may take that long.
    hypothesis.settings.register_profile(
        "any_host", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any_host")
    any_host = hypothesis.settings.get_profile("any_host")
    hypothesis.settings.register_profile("default_run", any_host, max_examples=DEFAULT_EXAMPLES)
    if is_default(config) and not config.option.everything:
        hypothesis.settings.load_profile("default_run")
    if is_whole(config):
        config.pluginmanager.register(FormsMet())


def pytest_collection() -> None:
    """Disable garbage collection while tests are collected, because it would take a quarter of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the objects that exist after collection of the tests from all later garbage collections.

    The leak check after a test may collect garbage, and to scan all these objects would take longer than most tests.
    They are not scanned once before either, because that would take most of a second in each process of the run.
    """
    gc.enable()
    gc.freeze()


_armed_at_s = -REARM_S


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Print all stacks if the test hangs.

    pytest's `faulthandler_timeout` starts and joins a thread for each test, which takes longer than many tests. Here
    one thread serves all tests that begin within REARM_S.
    """
    global _armed_at_s
    if (now_s := time.monotonic()) - _armed_at_s >= REARM_S:
        _armed_at_s = now_s
        faulthandler.dump_traceback_later(HANG_S, file=item.config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    # pytest closes the file of the stacks next.
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep kernels that this run compiles in a folder of this run, for its daemons and later tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The parent folder is shared by the test processes of a run.
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULEASE_CPU_CACHE", str(folder / "compiled"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lingering() -> Iterator[None]:
    """Let the thread for idle sessions end with the last session, so that a leak check does not wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle_frees, "LINGER_S", 0.0)
        patch.setattr(idle_frees, "POLL_INTERVAL_S", 0.02)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_closes() -> Iterator[None]:
    """Let a closed context wait for its last kernels for as long as a busy host takes to run them.

    A worker process that gives up exits, so its threads end. In a test process they would remain.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "CLOSE_WAIT_S", PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def _decode_kernels(_compiled_once: None) -> None:
    """Compile the decode engine's kernels in one test process, because this is most of the time of its first tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    with (Path(os.environ["GPULEASE_CPU_CACHE"]).parent / "decode-kernels").open("a+") as compiled:
        # The other test processes wait here; then the kernels are in the cache.
        fcntl.flock(compiled, fcntl.LOCK_EX)
        if not compiled.tell():
            environment = {name: value for name, value in python_environment().items() if name != ADDRESS_VARIABLE}
            command = [sys.executable, "-P", "-m", "gpulease.client.cli", "decode", "x", "--max-tokens", "1"]
            subprocess.run(command, check=True, capture_output=True, env=environment)
            compiled.write("compiled\n")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Check that each test leaves no descriptor, thread, child process or signal handler behind in this process."""
    before = Holdings()
    yield
    check_for_leaks(before)


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """Return a daemon for all tests that leave it as it was: one card of 6 GiB, a Unix socket and a TCP listener.

    In its workers one thread runs each kernel, because tests run concurrently: a second thread would poll for work
    between launches, a tenth of the decode tests' processor time. The workers of all other daemons use every core.
    """
    with running(Daemon(tcp=True, environment={THREADS_VARIABLE: "1"})) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """Return the shared daemon. After the test it must be idle again, with all bytes free and nothing left open."""
    yield from lent(shared_daemon)


@pytest.fixture
def session(lease: GpuLease) -> Iterator[GpuSession]:
    """Return a session on the fixture `lease`, which the test's file defines."""
    with GpuSession(lease) as session:
        yield session


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    """Return another tenant's session. Its results must be correct during the whole test."""
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        neighbour.check()
        yield neighbour
        neighbour.check()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator["EtcdCluster"]:
    """Return an etcd cluster for this test alone."""
    from helpers.etcd_cluster import EtcdCluster

    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> "Pki":
    """Return a certificate authority that issues certificates for a node and for tenants."""
    from helpers.remote import Pki

    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts daemons, with `Daemon`'s arguments. After the test each must stop cleanly."""
    with ExitStack() as stack:

        def start(**arguments: Any) -> Daemon:
            daemon = Daemon(**arguments)
            stack.callback(daemon.stop)
            daemon.wait_until_it_answers()
            return daemon

        yield start


@pytest.fixture(scope="session")
def _lasting_daemons() -> Iterator[list[LastingDaemon]]:
    yield from stop_lasting()


@pytest.fixture
def lasting(_lasting_daemons: list[LastingDaemon]) -> Iterator[LastingDaemon]:
    """Return a daemon with default settings, with leases that outlive it. Many tests use it, one after another."""
    yield from lent_lasting(_lasting_daemons, LastingDaemon)


@pytest.fixture
def start_lasting() -> Iterator[Callable[..., LastingDaemon]]:
    """Return a function that starts daemons with leases that outlive them.

    It takes `LastingDaemon`'s arguments, and `faults` of the first daemon. After the test, the last daemon must stop
    cleanly.
    """
    with ExitStack() as stack:

        def start(*, faults: Faults | None = None, **arguments: Any) -> LastingDaemon:
            lasting = LastingDaemon(**arguments)
            stack.callback(lasting.stop)
            lasting.start(faults)
            return lasting

        yield start
