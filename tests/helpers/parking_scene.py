"""A lease with marked memory, and a node where its workers stop themselves at a step of parking, for tests of kills."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulease.client import Busy, GpuExclusivityClass, GpuLease, GpuLeaseError, GpuSession, Unsupported
from gpulease.client.sync.driver import ask
from gpulease.client.sync.regions import Region
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseMove
from helpers.audit_log import check_whole, records
from helpers.daemon import Faults
from helpers.lasting import LastingDaemon
from helpers.leaks import SHARED_FOLDERS
from helpers.processes import continue_process
from helpers.waiting import PATIENCE_S, wait_until

MIB = 1 << 20
SLICE, PART = 12 * MIB, 2 * MIB
CONFIG = """
audit = "{audit}"
[limits]
park_memory = "256MiB"
park_stay_ms = 0
parks_per_minute = 1000000
session_timeout_s = {timeout_s}
"""


@dataclass
class Parked:
    """A lease with two allocations and a region, each filled with a mark."""

    node: LastingDaemon
    audit: Path
    lease: GpuLease
    session: GpuSession

    def __post_init__(self) -> None:
        self.parts: list[Any] = [self.session.mem_alloc(PART), self.session.mem_alloc(PART)]
        self.region: Region = self.lease.region(PART)
        self.parts.append(self.region)
        for mark, part in enumerate(self.parts, 1):
            self.session.mem_write(part, 0, bytes([mark]) * PART)
        self.session.sync()
        self.pid = self.node.worker_pid(self.lease.lease_id)

    def row(self) -> dict[str, Any]:
        return self.node.now.query(self.lease.lease_id)

    def region_row(self) -> dict[str, Any]:
        return self.node.now.query(self.region.lease_id)

    def workers(self) -> list[int]:
        """Return the pids of all workers that were forked for the lease and have not ended."""
        name = f"gpul-{self.lease.lease_id:032x}"[:15]
        return [info.pid for info in self.node.processes() if info.name == name and not info.is_zombie]

    @property
    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def check(self) -> None:
        for mark, part in enumerate(self.parts, 1):
            assert bytes(self.session.mem_read(part, 0, PART)) == bytes([mark]) * PART, "wrong bytes"

    def leave(self, device: str | None = None) -> None:
        """Make the session leave its worker, for the card `device`, when its client has no operation in progress."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                ask(Opcode.LEASE_MOVE, LeaseMove(self.lease.lease_id, device), self.node.address)
            except (Busy, Unsupported) as error:
                if time.monotonic() > until or not ("has sent a request" in str(error) or "returning" in str(error)):
                    raise
                time.sleep(0.01)
            else:
                return

    def go_on(self) -> None:
        continue_process(self.pid)

    def is_over(self) -> bool:
        return str(self.row()["state"]) == "torndown"

    def check_gone(self) -> None:
        """Check that the lease holds nothing on a card or the host, and that it and its region ended once."""
        wait_until(self.is_over, "the lease has ended")
        # A worker that was set aside for the next one is proved free on its own, perhaps after the lease.
        wait_until(lambda: not any(map(any, self._held())), "nothing is held", seen=self._held)
        wait_until(lambda: all(self.ends()), "both ends are in the audit log")

    def holding(self) -> list[str]:
        """Return the UUIDs of the cards that hold bytes of a lease."""
        return [card["uuid"] for card in self.node.now.inventory().details if card["held_bytes"]]

    def _held(self) -> list[list[int]]:
        names = ("held_bytes", "fenced_bytes", "park_host_bytes", "parked_bytes")
        return [[card[name] for name in names] for card in self.node.now.inventory().details]

    def ends(self) -> list[int]:
        """Return how often the lease and its region have ended, according to the audit log."""
        ends = Counter(record["data"]["lease"] for record in records(self.audit) if record["kind"] == "end")
        return [ends[f"{one:032x}"] for one in (self.lease.lease_id, self.region.lease_id)]


def parkable(node: LastingDaemon, size: int) -> GpuLease:
    builder = node.now.builder(size).lease_secs(600).timeout(30).parkable().device("0")
    return builder.exclusivity(GpuExclusivityClass.SHARED).acquire()


class ParkingNode:
    """A node with parking, for one test after another. Its workers stop at the step that a test names."""

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: int = 30,
        within: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
        cards: int = 1,
    ) -> None:
        self.audit, self._step = folder / "audit", folder / "step"
        self._step.write_text("")
        config = CONFIG.format(audit=self.audit, timeout_s=timeout_s)
        self.lasting = LastingDaemon(vram=("200MiB",) * cards, config=config, within=within)
        self._faults = Faults(dict(constants or {}), stops_workers_at=self._step)
        self.lasting.start(self._faults)
        # The next test uses the broker that this test has restarted.
        SHARED_FOLDERS.add(self.lasting.folder)

    def restart(self) -> None:
        """Kill the broker and start the next one."""
        self.lasting.restart(self._faults)

    def kill_zygote(self) -> None:
        self.lasting.now.allowed_trouble.append("the zygote died")
        os.kill(self.lasting.zygotes()[0], signal.SIGKILL)

    @contextmanager
    def parked(self, step: str = "", *, size: int = SLICE, loses_zygote: bool = False) -> Iterator[Parked]:
        """Yield a lease whose worker stops at a step.

        Afterwards it must have ended once, and the node must be idle again.
        """
        # The previous test may have killed the zygote.
        zygotes = wait_until(self.lasting.zygotes, "a zygote runs")
        with self.next_workers_stop_at(step):
            lease = parkable(self.lasting, size)
        scene = Parked(self.lasting, self.audit, lease, GpuSession(lease))
        yield scene
        assert scene.ends() == [1, 1]
        check_whole(self.audit)
        assert loses_zygote or self.lasting.zygotes() == zygotes

    @contextmanager
    def next_workers_stop_at(self, step: str) -> Iterator[None]:
        """Have the workers that are forked meanwhile stop at a step."""
        self._step.write_text(step)
        try:
            yield
        finally:
            self._step.write_text("")

    def arriving(self, scene: Parked, step: str) -> "InBackground":
        """Use a session that has left its worker. Its next worker stops at the step."""
        lease_id = scene.lease.lease_id
        wait_until(lambda: not self.lasting.has_worker(lease_id), "its worker has ended")
        with self.next_workers_stop_at(step):
            doing = InBackground(scene.check)
            wait_until(lambda: self.lasting.has_worker(lease_id), "another worker is there")
            scene.pid = self.lasting.worker_pid(lease_id)
        return doing

    def rest(self) -> None:
        """Prepare the node for the next test.

        Fails if an error was logged; ends the leases that a failed test has left.
        """
        assert not self.lasting.now.trouble(), self.lasting.logs()
        for lease in self.lasting.now.leases():
            self.lasting.now.revoke(int(lease["lease_id"], 16))
        self.lasting.check_idle()


@contextmanager
def own_node(folder: Path, **options: Any) -> Iterator[ParkingNode]:
    node = ParkingNode(folder, **options)
    try:
        yield node
    finally:
        node.lasting.stop()


class InBackground(threading.Thread):
    """A call in a separate thread, and the error that it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: GpuLeaseError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except GpuLeaseError as error:
            self.error = error
