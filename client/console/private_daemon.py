"""The daemon that a command uses: the one that is running, or a private one that ends with the command."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite, die_by_signal
from gpulease.protocol.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS, MAX_UNIX_PATH_BYTES, UnixAddress, parse_address

START_TIMEOUT_S: Final = 90.0
"""Longest time for a daemon to listen, in seconds: on a GPU host it first makes a context on every card."""

SOCKET_NAME: Final = "daemon.sock"

STOP_TIMEOUT_S: Final = 15.0
"""Longest time for the daemon to release everything before it is killed, in seconds."""

SOCKET_NAME_BYTES: Final = 54
"""Room after the folder of temporary files, in bytes: 32 for `/gpulease-xxxxxxxx/node-10/state`, the longest folder of
a fleet's daemon, and 22 for the sockets that the daemon creates there."""

UNWINDING: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals, other than an interrupt, that end a program that has no handler for them."""

CACHE_VARIABLE: Final = "GPULEASE_CPU_CACHE"
"""Name of the variable with workers' folder for compiled kernels. Without it, each session compiles its kernels
again."""

_POLL_S: Final = 0.01


def running_address() -> str | None:
    """Return GPULEASE_ADDRESS, else the default socket if a daemon listens there, else None."""
    address_text = os.environ.get(ADDRESS_VARIABLE)
    # A named address is used even if nothing answers there: the error should name it.
    if address_text:
        return address_text
    address = parse_address(DEFAULT_ADDRESS)
    return DEFAULT_ADDRESS if isinstance(address, UnixAddress) and _answers(address.path) else None


def _cache() -> dict[str, str]:
    """Return the variable that names the user's folder for kernels compiled by the embedded driver."""
    # XDG Base Directory Specification: a relative path is ignored.
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache"
    except RuntimeError:
        # The user has no home folder.
        return {}
    return {CACHE_VARIABLE: str(folder / "gpulease" / "cpu")}


class PrivateServer:
    """A process of gpulease that listens on a socket in its own folder.

    Attributes:
        address: The address at which the process listens.

    Args:
        folder: The process's folder.
        module: The module that it runs.
        options: The module's options.
        environment: Environment variables in addition to this process's.
    """

    def __init__(
        self, folder: Path, module: str, options: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._path = str(folder / SOCKET_NAME)
        self.address = f"unix:{self._path}"
        self._log_path = folder / "log"
        # Pass -P, because a module in the current folder must not shadow one of the daemon's.
        self._command = [sys.executable, "-P", "-m", module, "--listen", self.address, *options]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it answers. Raises MissingPrerequisite."""
        self.begin()
        self.await_answer()

    def begin(self) -> None:
        """Start the process, and return immediately."""
        # The log goes to a file: a pipe that is not read would block the process.
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_cache() | os.environ | self._environment,
            )

    def await_answer(self) -> None:
        """Wait until the process answers at its socket. Raises MissingPrerequisite."""
        if self._process is not None:
            _wait_until_it_answers(self._process, self._path, self._log_path)

    @property
    def has_crashed(self) -> bool:
        """True if the process has ended with a failure: processes that it started may still run."""
        return self._process is not None and self._process.poll() not in (None, 0)

    def kill(self) -> None:
        """Kill the process, as if it crashed: sessions of a daemon with a state folder continue."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill_all(self) -> None:
        """Kill the process and all its descendants, as if its host were lost."""
        if self._process is not None:
            # Collect all descendants before killing any: after the broker's death they have another parent.
            for pid in _processes_of(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask_to_stop(self) -> None:
        """Send SIGTERM, so that the process stops in order; returns immediately."""
        if self._process is not None:
            _ask_to_stop(self._process)

    def stop(self) -> None:
        """Stop the process in order, or kill it after STOP_TIMEOUT_S."""
        if self._process is not None:
            _stop(self._process)


class PrivateDaemon(PrivateServer):
    """A daemon's process, with settings as TOML.

    Attributes:
        folder: Its own folder.
    """

    def __init__(
        self, folder: Path, options: list[str], settings: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        if settings:
            file = folder / "settings.toml"
            file.write_text(settings)
            options = [*options, "--config", str(file)]
        super().__init__(folder, "gpulease.daemon", options, environment)


@contextlib.contextmanager
def private_daemon(
    driver: str,
    vram: tuple[str, ...] = (),
    *,
    also_at: tuple[str, ...] = (),
    warm_contexts: int = 0,
    settings: str = "",
) -> Iterator[str]:
    """Start a daemon that ends with the block; yields its address. Raises MissingPrerequisite.

    Args:
        driver: The daemon's driver.
        vram: Device memory for leases, per card.
        also_at: Further addresses to listen at.
        warm_contexts: Number of contexts that the daemon keeps ready.
        settings: Further settings, as TOML.
    """
    # Private daemons get their options on the command line. Only settings without an option go into a file.
    options = ["--driver", driver]
    for address in also_at:
        options += ["--listen", address]
    if warm_contexts:
        options += ["--warm-contexts", str(warm_contexts)]
    for size in vram:
        options += ["--vram", size]
    with unwound_by_signals(), _folder() as folder:
        daemon = PrivateDaemon(folder, options, settings)
        try:
            # stop() also runs if start() is interrupted or fails: the process may exist already.
            daemon.start()
            yield daemon.address
        finally:
            daemon.stop()


@contextlib.contextmanager
def killable_daemon(
    driver: str, vram: tuple[str, ...] = (), *, settings: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[PrivateDaemon]:
    """Start a daemon until the block ends; its leases outlive its broker. Raises MissingPrerequisite.

    Args:
        driver: The daemon's driver.
        vram: Device memory for leases, per card.
        settings: Further settings, as TOML, in which FOLDER is the daemon's own folder.
        environment: As in PrivateServer.
    """
    options = ["--driver", driver]
    for size in vram:
        options += ["--vram", size]
    with unwound_by_signals(), _folder() as folder:
        settings = f'state = "{folder / "state"}"\n' + settings.replace("FOLDER", str(folder))
        daemon = PrivateDaemon(folder, options, settings, environment)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like an interrupt, and then the process by the same signal.

    Otherwise either signal would end this process at once and leave the daemon behind.
    """
    received: list[signal.Signals] = []

    # Only the first signal has an effect, because a second one must not interrupt the clean-up.
    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:
            return
        received.append(signal.Signals(number))
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # interrupts are ignored, as shells do for `&`
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    is_main = threading.current_thread() is threading.main_thread()
    # Replace only default actions, not handlers that the program or its parent has set.
    replaced = [number for number in UNWINDING if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
        # Die by the signal, so that the parent sees how this process ended.
        if received:
            die_by_signal(received[0])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpulease-", dir=short_folder()) as folder:
        yield Path(folder)


def short_folder() -> str | None:
    """Return a folder in which a socket's path is short enough: None for the usual one, else /tmp."""
    # A socket's path has a limit of 107 bytes; some hosts have long folders for temporary files.
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > MAX_UNIX_PATH_BYTES - SOCKET_NAME_BYTES else usual


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", path: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _answers(path):
        if process.poll() is not None or time.monotonic() > deadline_s:
            # The daemon's last line gives the reason. A missing module means that the extra is not installed.
            log_lines = log.read_text(errors="replace").strip().splitlines()
            if any("No module named" in line for line in log_lines):
                raise MissingPrerequisite(
                    "the daemon is not installed with this client: pip install '.[daemon]' in gpulease's repository"
                )
            raise MissingPrerequisite(log_lines[-1] if log_lines else "the daemon did not start, and printed nothing")
        time.sleep(_POLL_S)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


def _ask_to_stop(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    _ask_to_stop(process)
    # Let it stop in order first, because a daemon that is killed leaves workers behind.
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def children_of(parent: int) -> list[tuple[int, str]]:
    """Return a process's children, each as process id and name."""
    # The kernel need not have a list of children (proc_tid_children(5)), so check every process's parent.
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The name is in parentheses and may contain anything, even parentheses (proc_pid_stat(5)).
                name, _, rest = Path("/proc", entry, "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # The process has ended by now.
            if int(rest.split()[1]) == parent:
                children.append((int(entry), name))
    return children


def _processes_of(broker: int) -> list[int]:
    """Return the process ids of a daemon: its broker's, and those of all descendants."""
    # The list grows while it is walked, so all descendants are found, level by level.
    processes = [broker]
    for pid in processes:
        processes += [child for child, _ in children_of(pid)]
    return processes
