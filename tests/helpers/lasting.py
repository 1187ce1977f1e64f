"""A daemon with leases that outlive it, which can be killed and restarted in the same folder."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpulease.client import GpuLease, LeaseExpired
from gpulease.daemon.remote.acceptor import SPARE_RELAYS
from helpers.daemon import FOLDER, SHORT_LEASES_S, Daemon, Faults, T
from helpers.free_ports import HeldPorts
from helpers.leaks import SHARED_FOLDERS
from helpers.processes import ProcessInfo, marked
from helpers.waiting import wait_until


class LastingDaemon:
    """Several daemons in succession, with the same state.

    Args:
        state: The folder of the state that outlives each daemon; by default it is in the daemon's own folder.

    Attributes:
        now: The daemon that is running, or ran last.
        state: The folder of the state that outlives each daemon.
    """

    def __init__(
        self,
        *,
        vram: Sequence[str] = ("6GiB",),
        config: str = "",
        driver: str = "cpu",
        tls: bool = False,
        log_format: str = "human",
        within: Sequence[str] = (),
        state: Path | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpul-", dir="/tmp"))
        self.state = state or self.folder / "state"
        self.config = f'state = "{self.state}"\n{config}'
        self._vram, self._driver, self._tls, self._log_format = vram, driver, tls, log_format
        self._within = within
        # A client that has lost its connection reconnects to the next daemon at the same address.
        self._held = HeldPorts(int(tls))
        self._all: list[Daemon] = []
        self._has_faults = False
        self.now: Daemon

    @property
    def address(self) -> str:
        """The address of the Unix socket, which is the same for all its daemons."""
        return f"unix:{self.folder / 'd.sock'}"

    def begin(self, faults: Faults | None = None, stderr: int | None = None) -> Daemon:
        """Start the next daemon, without waiting until it replies. By default, its stderr is its log."""
        daemon = Daemon(
            vram=self._vram,
            config=self.config,
            driver=self._driver,
            tls=self._tls,
            tls_port=self._held.ports[0] if self._tls else 0,
            folder=self.folder,
            faults=faults,
            stderr=stderr,
            log_format=self._log_format,
            within=self._within,
        )
        self._all.append(daemon)
        self.now, self._has_faults = daemon, faults is not None
        return daemon

    def start(self, faults: Faults | None = None) -> Daemon:
        """Start the next daemon. Returns when it replies."""
        daemon = self.begin(faults)
        daemon.wait_until_it_answers()
        return daemon

    def kill(self) -> None:
        self.now.kill()

    def restart(self, faults: Faults | None = None) -> Daemon:
        self.kill()
        return self.start(faults)

    def processes(self) -> list[ProcessInfo]:
        """Return every process of any of the daemons that is still running."""
        return marked(f"{FOLDER}={self.folder}")

    def zygotes(self) -> list[int]:
        found = {info.pid: info.parent for info in self.processes() if info.name == "gpul-zygote"}
        # A worker that was just forked still has the zygote's name.
        return [pid for pid, parent in found.items() if parent not in found]

    def workers(self) -> dict[str, int]:
        return {
            info.name: info.pid
            for info in self.processes()
            if info.name.startswith("gpul-") and info.name != "gpul-zygote"
        }

    def short_lease(self, set_up: Callable[[GpuLease], T]) -> tuple[GpuLease, T]:
        """Return a lease that soon expires, and the result of `set_up` with it, like `Daemon.short_lease`."""
        for seconds in SHORT_LEASES_S:
            lease = self.now.builder(seconds=seconds).acquire()
            try:
                return lease, set_up(lease)
            except (LeaseExpired, KeyError):
                self.now.wait_for_end(lease.lease_id)
        raise AssertionError(f"{set_up} takes longer than {SHORT_LEASES_S[-1]:g} s")

    def worker_pid(self, lease_id: int) -> int:
        return self.workers()[f"gpul-{lease_id:032x}"[:15]]

    def has_worker(self, lease_id: int) -> bool:
        return f"gpul-{lease_id:032x}"[:15] in self.workers()

    def logs(self, last: int = 4) -> str:
        return "\n".join(f"--- {daemon.process.pid}\n{daemon.log()}" for daemon in self._all[-last:])

    def check_idle(self) -> None:
        """Fail unless it soon has no lease, all bytes free, one zygote and no worker."""
        wait_until(lambda: not self.now.leases(), "no lease is left", seen=self.now.leases)
        for card in self.now.inventory().details:
            assert card["held_bytes"] == card["fenced_bytes"] == 0, card
        wait_until(
            lambda: len(self.processes()) == 2 + self._tls * (1 + SPARE_RELAYS),
            "the broker, one zygote, and the gate with the relays that wait are left",
            seen=self.processes,
        )

    def rest(self) -> None:
        """Prepare it for the next test: a daemon without faults and leases. Fails if a daemon has logged an error."""
        for daemon in self._all:
            assert not daemon.trouble(), daemon.log()
        if self._has_faults or self.now.allowed_trouble or self.now.process.poll() is not None:
            self.restart()
        # Caught exceptions keep frames, and so leases and connections, alive in reference cycles.
        gc.collect()
        for lease in self.now.leases():
            self.now.revoke(int(lease["lease_id"], 16))
        self.check_idle()
        del self._all[:-1]

    def stop(self) -> None:
        """Send SIGINT, which also ends sessions. Fails if any daemon left a process, or logged an error."""
        try:
            if self.now.process.poll() is None:
                self.now.process.send_signal(signal.SIGINT)
                assert self.now.wait_for_exit() == 0, self.now.log()
            wait_until(lambda: not self.processes(), "no process is left", seen=self.processes)
            assert not list((self.state / "zygotes").iterdir())
            for daemon in self._all:
                assert not daemon.trouble(), daemon.log()
        finally:
            self.discard()

    def discard(self) -> None:
        for info in self.processes():
            os.kill(info.pid, signal.SIGKILL)
        for daemon in self._all:
            if daemon.process.poll() is None:
                daemon.kill()
        self._held.close()
        shutil.rmtree(self.folder)


def lent_lasting(daemons: list[LastingDaemon], make: Callable[[], LastingDaemon]) -> Iterator[LastingDaemon]:
    """Lend a test the daemon in `daemons`, which it may kill and restart; afterwards no lease is left.

    `make` makes the first test's daemon, and another one after a failed test.
    """
    if not daemons:
        daemons.append(made := make())
        made.start()
    (lasting,) = daemons
    # The next test uses the processes that this one starts.
    SHARED_FOLDERS.add(lasting.folder)
    yield lasting
    try:
        lasting.rest()
    except BaseException:
        daemons.clear()
        lasting.discard()
        raise


def stop_lasting() -> Iterator[list[LastingDaemon]]:
    """Yield an empty list for `lent_lasting`. At the end, the daemon in it must stop cleanly."""
    daemons: list[LastingDaemon] = []
    yield daemons
    for lasting in daemons:
        lasting.stop()
