"""A real `gpuleased` in a separate process, and checks that nothing of it remains after it has stopped."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import gpulease
from gpulease.client import GpuBuilder, GpuLease, LeaseExpired
from gpulease.client.sync.driver import ask
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty, Inventory, LeaseRef, LeaseRevoke, Ping
from helpers.processes import ProcessInfo, descendants, marked, open_files
from helpers.waiting import wait_until

T = TypeVar("T")

TESTS: Final = Path(__file__).parents[1]
START_LIMIT_S: Final = 120.0
SHORT_LEASES_S: Final = (0.8, 4.0, 20.0, 100.0)
STOP_LIMIT_S: Final = 120.0
MARK: Final = "GPULEASE_TEST_DAEMON"
FOLDER: Final = "GPULEASE_TEST_FOLDER"

_TROUBLE: Final = re.compile(
    r' (ERROR|CRITICAL) |"level":"(error|critical)"|^Traceback| said="?Traceback|Exception ignored', re.MULTILINE
)
_TCP: Final = re.compile(r'listens on (tcp:[^\s"]+)')
_TLS: Final = re.compile(r'listens on (tls:[^\s"]+)')


def python_environment() -> dict[str, str]:
    """Return an environment in which Python finds the same gpulease as this process, and the tests' helpers."""
    package_parent = Path(next(iter(gpulease.__path__))).parent
    path = [str(package_parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


@dataclass
class Faults:
    """The faults of a daemon, which `helpers.faulty_daemon` explains."""

    constants: dict[str, Any] = field(default_factory=dict)
    withhold_proof_while: Path | None = None
    inflate_while: Path | None = None
    hang_syncs_while: Path | None = None
    hang_commits_while: Path | None = None
    others_in: Path | None = None
    names_in: Path | None = None
    leaks_descriptors: bool = False
    has_hostile_workers: bool = False
    stops_workers_at: Path | None = None
    fleet_design: str | None = None

    def as_argument(self) -> str:
        flags = {
            name: getattr(self, name)
            for name in (
                "withhold_proof_while",
                "inflate_while",
                "hang_syncs_while",
                "hang_commits_while",
                "others_in",
                "names_in",
                "stops_workers_at",
            )
        }
        paths = {name: None if path is None else str(path) for name, path in flags.items()}
        names = ("constants", "leaks_descriptors", "has_hostile_workers", "fleet_design")
        return json.dumps({name: getattr(self, name) for name in names} | paths)


class Daemon:
    """One daemon, its folder and its log.

    Attributes:
        address: Its Unix socket.
        folder: A folder with a short path, for the socket and the test's files.
        allowed_trouble: Patterns of ERROR lines that the test provokes on purpose.
        kept_connections: Maximum number of connections that a program keeps open for several tests.

    Args:
        tls_port: The port of its TLS listener; 0 for any.
        within: A command that starts it elsewhere, for example in a namespace. It must exec, so that the pid stays.
        environment: Variables that are set in addition to this process's.
    """

    def __init__(
        self,
        *,
        vram: Sequence[str] = ("6GiB",),
        tcp: bool = False,
        tls: bool = False,
        tls_port: int = 0,
        config: str = "",
        faults: Faults | None = None,
        driver: str = "cpu",
        folder: Path | None = None,
        listens: bool = True,
        stderr: int | None = None,
        log_format: str = "human",
        within: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # Do not use pytest's tmp_path, because a Unix socket's path has at most 107 bytes.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="gpul-", dir="/tmp"))
        self.socket_path = self.folder / "d.sock"
        self.address = f"unix:{self.socket_path}"
        self.allowed_trouble: list[str] = []
        self.kept_connections = 0
        self._was_killed = False
        self._owns_folder = folder is None
        self._mark = uuid.uuid4().hex
        self._listeners = 1 + tcp + tls
        arguments = ["--driver", driver, "--log-format", log_format] + ["--listen", self.address] * listens
        arguments += ["--listen", "tcp:127.0.0.1:0"] * tcp
        arguments += ["--listen", f"tls:127.0.0.1:{tls_port}"] * tls
        arguments += [part for size in vram for part in ("--vram", size)]
        if config:
            (self.folder / "config.toml").write_text(config)
            arguments += ["--config", str(self.folder / "config.toml")]
        module = ["gpulease.daemon"] if faults is None else ["helpers.faulty_daemon", faults.as_argument()]
        self._log_path = self.folder / f"log-{self._mark}"
        self._earlier_log = ""
        # Open it to append, so that it can be truncated.
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-P", "-m", *module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                env=python_environment() | {MARK: self._mark, FOLDER: str(self.folder)} | dict(environment),
            )

    # --- start and end ---

    def wait_until_it_answers(self) -> None:
        """Return when it listens and replies. Fails with its log if it ends instead."""

        def listens() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with status {self.process.returncode}:\n{self.log()}")
            return self.log().count("listens on") == self._listeners

        wait_until(listens, "the daemon listens", START_LIMIT_S)
        assert ask(Opcode.PING, Ping(7), self.address) == Ping(7)

    def wait_for_exit(self, within_s: float = STOP_LIMIT_S) -> int:
        return self.process.wait(within_s)

    def stop(self) -> None:
        """Send SIGTERM, and check that it exits with status 0 and leaves nothing behind."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.wait_for_exit() == 0, self.log()
            self.check_nothing_is_left()
            assert self._was_killed or not self.socket_path.exists()
            assert not self.trouble(), self.log()
        finally:
            self.discard()

    def kill(self) -> None:
        self._was_killed = True
        self.process.kill()
        self.process.wait()

    def check_nothing_is_left(self) -> None:
        """Fail if a zygote or a worker outlives its daemon."""
        wait_until(lambda: not self.processes(), "no process of the daemon is left")

    def discard(self) -> None:
        """Kill its remaining processes, and remove its folder."""
        for info in self.processes():
            os.kill(info.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.kill()
        if self._owns_folder:
            shutil.rmtree(self.folder)

    # --- log and replies ---

    def log(self) -> str:
        return self._earlier_log + self._log_path.read_text(errors="replace")

    def shorten_log(self) -> None:
        """Truncate its log file, so that the log has room on a disk that is about to be full."""
        self._earlier_log = self.log()
        os.truncate(self._log_path, 0)

    def trouble(self) -> list[str]:
        """Return the logged errors that are not allowed."""
        lines = [line for line in self.log().splitlines() if _TROUBLE.search(line)]
        return [line for line in lines if not any(re.search(pattern, line) for pattern in self.allowed_trouble)]

    @property
    def tcp_address(self) -> str:
        found = _TCP.search(self.log())
        assert found, self.log()
        return found[1]

    @property
    def tls_address(self) -> str:
        found = _TLS.search(self.log())
        assert found, self.log()
        return found[1]

    def inventory(self) -> Inventory:
        reply = ask(Opcode.GET_INVENTORY, Empty(), self.address)
        assert isinstance(reply, Inventory)
        return reply

    def available_bytes(self, card: int = 0) -> int:
        return self.inventory().entries[card].available_bytes

    def leases(self) -> list[dict[str, Any]]:
        """Return the report of LEASE_LIST_ACTIVE to an operator."""
        return list(ask(Opcode.LEASE_LIST_ACTIVE, Empty(), self.address).report)

    def query(self, lease_id: int) -> dict[str, Any]:
        """Return the report of LEASE_QUERY to an operator."""
        return dict(ask(Opcode.LEASE_QUERY, LeaseRef(lease_id), self.address).report)

    def revoke(self, lease_id: int, reason: str = "maintenance") -> int:
        return int(ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, reason), self.address).outcome)

    def wait_for_end(self, lease_id: int) -> None:
        """Return when the lease has ended and its bytes are free."""
        wait_until(lambda: self.query(lease_id)["state"] == "torndown", "the lease is gone", seen=self.leases)

    def builder(self, size_bytes: int = 1 << 20, seconds: float = 60) -> GpuBuilder:
        """Return a builder for a small lease, which the test may change."""
        return GpuBuilder(self.address).min_vram(size_bytes).lease_secs(seconds)

    def short_lease(
        self, set_up: Callable[[GpuLease], T], size_bytes: int = 1 << 20, submit_bytes: int = 0
    ) -> tuple[GpuLease, T, int]:
        """Return a lease that soon expires, the result of `set_up` with it, and its worker's process id.

        On a busy host the lease may expire before that. Then a longer lease is tried.
        """
        for seconds in SHORT_LEASES_S:
            builder = self.builder(size_bytes, seconds)
            lease = (builder.submits(submit_bytes) if submit_bytes else builder).acquire()
            try:
                return lease, set_up(lease), self.worker_pid(lease.lease_id)
            except (LeaseExpired, KeyError):
                self.wait_for_end(lease.lease_id)
        raise AssertionError(f"{set_up} takes longer than {SHORT_LEASES_S[-1]:g} s")

    # --- its processes ---

    def processes(self) -> list[ProcessInfo]:
        """Return every running process that it or its children started, including itself."""
        return marked(f"{MARK}={self._mark}")

    def zygote_pid(self) -> int:
        found = {info.pid: info.parent for info in self.processes() if info.name == "gpul-zygote"}
        # A newly forked worker still has its zygote's name.
        (zygote,) = [pid for pid, parent in found.items() if parent not in found]
        return zygote

    def worker_pid(self, lease_id: int) -> int:
        """Return the process id of a lease's worker. Raises KeyError if the lease has none."""
        # If the session has moved to another worker, the earlier worker keeps the same name until it has ended.
        found: list[int] = []

        def is_single() -> bool:
            found[:] = self._worker_pids(lease_id)
            return len(found) < 2

        wait_until(is_single, "the lease has one worker", seen=lambda: found)
        if not found:
            raise KeyError(f"the lease {lease_id:x} has no worker")
        return found[0]

    def _worker_pids(self, lease_id: int) -> list[int]:
        return [info.pid for info in self.processes() if info.name == worker_name(lease_id)]

    def has_worker(self, lease_id: int) -> bool:
        return any(info.name == worker_name(lease_id) for info in self.processes())

    def open_files(self) -> dict[int, str]:
        return open_files(self.process.pid)

    def check_idle(self, files_before: int) -> None:
        """Fail unless it soon has no lease, all bytes free, no worker, no zombie and no further descriptor."""
        # Caught exceptions keep frames, and so sessions and connections, alive in reference cycles.
        gc.collect()
        wait_until(lambda: not self.leases(), "no lease is left", seen=self.leases)
        for card in self.inventory().details:
            assert card["held_bytes"] == 0, card
            assert card["fenced_bytes"] == 0, card
        wait_until(
            lambda: [info.name for info in descendants(self.process.pid)] == ["gpul-zygote"],
            "the zygote is the daemon's only child",
            seen=lambda: descendants(self.process.pid),
        )
        most = files_before + self.kept_connections
        wait_until(lambda: len(self.open_files()) <= most, "the broker's descriptors are closed", seen=self.open_files)


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    """Wait until a daemon replies. After the block, it must stop cleanly. If either fails, it is discarded."""
    try:
        daemon.wait_until_it_answers()
        yield daemon
    except BaseException:
        daemon.discard()
        raise
    daemon.stop()


def lent(daemon: Daemon) -> Iterator[Daemon]:
    """Lend a test a daemon that other tests also use. After the test it must be idle, with nothing left open."""
    files = len(daemon.open_files())
    yield daemon
    daemon.check_idle(files)


def worker_name(lease_id: int) -> str:
    """Return a worker's name in /proc, which the kernel truncates to 15 bytes."""
    return f"gpul-{WorkerSpec(lease_id, '', 1, False).to_map()['lease']}"[:15]
