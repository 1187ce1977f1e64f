"""Fixtures every test may use, and the leak check that every test passes through."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

# one that forks would have started threads that remain; and tests run concurrently, not each on all cores
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import pytest

from gpulease.client import GpuLease, GpuSession
from gpulease.client.sync import idle_frees
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, Faults, lent, python_environment, running
from helpers.forms_met import FormsMet, is_whole
from helpers.kernels import Neighbour
from helpers.lasting import LastingDaemon
from helpers.leaks import SHARED_FOLDERS, Holdings, check_for_leaks

if TYPE_CHECKING:
    # Their packages need not be there where no test takes these fixtures.
    from helpers.etcd_cluster import EtcdCluster
    from helpers.remote import Pki

# Where bytecode is not to be written, each process of this run would compile all tests, and each daemon the product:
# that takes longer than the tests do.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

with suppress(ImportError):
    import uvloop

    # The first loop of a process opens a pipe for signals that libuv keeps until the process ends.
    uvloop.new_event_loop().close()


DEFAULT_MINUTES: Final = 6
EVERYTHING_MINUTES: Final = 15
BUSY_LOAD_PER_CORE: Final = 0.5
PROCESSES_PER_CORE: Final = 3
"""Many tests wait for a deadline or another process: others run then."""

DEFAULT_EXAMPLES: Final = 15
"""Of a property whose test does not say how many it needs; --everything tries hypothesis' own number."""

MOST_WAITING_PROCESSES: Final = 24
"""`-n auto` starts no more than this, or one for each core: each collects all tests first."""


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
    """Compile the tests of a fresh checkout once: its processes, which collect them at the same time, each would."""
    folders = [Path(argument) for argument in config.args]
    compiled = f"__pycache__/test_*.{sys.implementation.cache_tag}-pytest-*.pyc"
    if not is_default(config) or any(any(folder.rglob(compiled)) for folder in folders):
        return
    paths = [str(path) for folder in folders for path in folder.rglob("test_*.py")]
    cores = min(len(os.sched_getaffinity(0)), len(paths))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    # What can't be collected is reported by those who do it next.
    compilers = [
        subprocess.Popen([*collect, *paths[core::cores]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for core in range(cores)
    ]
    for compiler in compilers:
        compiler.wait()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let processes that are done take tests from others: a file's take a moment, or minutes."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report what runs and how long it takes; warn on a busy host, where it takes longer."""
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
    """Leave exhaustive and slow tests out, unless some files or names are asked for; everything has no slow ones.

    Of a test and the one that does all of it and more, the latter runs alone. Those that take longest begin first.
    """
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        names = getattr(item, "fixturenames", [])
        # Documents run the commands of the decode engine; tests that name it run an engine where they have a daemon.
        if "stage" in names or ("decode" in item.nodeid and "shared_daemon" in names):
            names.insert(0, "_decode_kernels")
    if not is_default(config):
        return
    marks = ["slow"] if config.option.everything else ["slow", "exhaustive"]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    classes = {item: cls for item in items if (cls := getattr(item, "cls", None)) and item not in left_out}
    # A class that runs its base's test with more examples runs instead of it.
    bases = {base for cls in classes.values() for base in cls.__mro__[1:]}
    left_out |= {item for item, cls in classes.items() if cls in bases}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_default(config: pytest.Config) -> bool:
    """Whether the command line names folders at most: no file, no expression."""
    chosen = config.option
    names_files = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return not (names_files or chosen.markexpr or chosen.keyword or getattr(chosen, "lf", False))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what was tried, a line for each subsystem."""
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
    # A shell starts what it runs in the background with interrupts ignored, nohup with hang-ups ignored: each process
    # would pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # By default an example that takes a fifth of a second fails, as does a second of drawing: on a busy host any may.
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
    """Let no garbage collection go through the tests as they are found: a quarter of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: the collections behind each test need not go through it again and again.

    They look for what a test has left, and would take longer than most tests. To look through it once, before, would
    take most of a second in each process of the run.
    """
    gc.enable()
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


@pytest.fixture(scope="session", autouse=True)
def _no_lingering() -> Iterator[None]:
    """The thread of idle sessions ends with the last one: each leak check would wait for the next session in vain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle_frees, "LINGER_S", 0.0)
        patch.setattr(idle_frees, "POLL_INTERVAL_S", 0.02)
        yield


@pytest.fixture(scope="session")
def _decode_kernels(_compiled_once: None) -> None:
    """One process of a run compiles the decode engine's kernels, which takes most of its first tests' time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    with (Path(os.environ["GPULEASE_CPU_CACHE"]).parent / "decode-kernels").open("a+") as compiled:
        # The other processes wait here, and find the kernels in the run's cache.
        fcntl.flock(compiled, fcntl.LOCK_EX)
        if not compiled.tell():
            environment = {name: value for name, value in python_environment().items() if name != ADDRESS_VARIABLE}
            command = [sys.executable, "-P", "-m", "gpulease.client.cli", "decode", "x", "--max-tokens", "1"]
            subprocess.run(command, check=True, capture_output=True, env=environment)
            compiled.write("compiled\n")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """After each test this process has the descriptors, threads and children it had before."""
    before = Holdings()
    yield
    check_for_leaks(before)


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for all tests that leave it as they found it: a card of 6 GiB, a Unix socket and TCP."""
    with running(Daemon(tcp=True)) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The shared daemon; afterwards it must be idle again, with all its bytes free and nothing left open."""
    yield from lent(shared_daemon)


@pytest.fixture
def session(lease: GpuLease) -> Iterator[GpuSession]:
    """The session of a file's own fixture `lease`."""
    with GpuSession(lease) as session:
        yield session


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    """Another tenant's session; its results must be right throughout."""
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        neighbour.check()
        yield neighbour
        neighbour.check()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator["EtcdCluster"]:
    """An etcd of the test's own."""
    from helpers.etcd_cluster import EtcdCluster

    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> "Pki":
    """An authority, and certificates for a node and tenants."""
    from helpers.remote import Pki

    return Pki.make(tmp_path_factory.mktemp("pki"))


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


@pytest.fixture(scope="session")
def _lasting_daemons() -> Iterator[list[LastingDaemon]]:
    """The daemon of all tests that restart one without settings; another follows if it can't be used again."""
    daemons: list[LastingDaemon] = []
    yield daemons
    for lasting in daemons:
        lasting.stop()


@pytest.fixture
def lasting(_lasting_daemons: list[LastingDaemon]) -> Iterator[LastingDaemon]:
    """A daemon with leases that outlive it, which a test may kill, stop and restart; no lease is left afterwards."""
    if not _lasting_daemons:
        lasting = LastingDaemon()
        _lasting_daemons.append(lasting)
        lasting.start()
    (lasting,) = _lasting_daemons
    SHARED_FOLDERS.add(lasting.folder)
    yield lasting
    try:
        lasting.rest()
    except BaseException:
        _lasting_daemons.clear()
        lasting.discard()
        raise


@pytest.fixture
def start_lasting() -> Iterator[Callable[..., LastingDaemon]]:
    """Starts daemons with leases that outlive them.

    Takes `LastingDaemon`'s arguments, and what is broken in the first; the last of each must stop well.
    """
    with ExitStack() as stack:

        def start(*, faults: Faults | None = None, **arguments: Any) -> LastingDaemon:
            lasting = LastingDaemon(**arguments)
            stack.callback(lasting.stop)
            lasting.start(faults)
            return lasting

        yield start
