"""A fleet that several tests of a file use, one after another. Each test finds it joined, without leases and claims."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from helpers.fleet_directory import Directory
from helpers.fleet_rig import FENCED, HORIZON_S, claims, fleet
from helpers.leaks import SHARED_FOLDERS
from helpers.waiting import wait_until


class LastingFleet:
    """Two nodes, which a test may kill, stop and start again.

    Attributes:
        address: The fleet's address, at a directory; "" without one.

    Args:
        with_directory: Whether a directory runs.
    """

    def __init__(self, folder: Path, *, with_directory: bool = False) -> None:
        with ExitStack() as stack:
            self.cluster, (first, second) = stack.enter_context(fleet(folder))
            self.nodes = (first, second)
            self.address = ""
            if with_directory:
                directory = stack.enter_context(Directory(self.cluster, folder / "d", horizon_s=str(HORIZON_S)))
                directory.wait_for("view of its fleet is current")
                self.address = f"fleet:{directory.address}"
                SHARED_FOLDERS.add(directory.folder)
            self._stack = stack.pop_all()
        # The next test uses the processes that this one starts.
        SHARED_FOLDERS.update({self.cluster.folder, *(node.folder for node in self.nodes)})
        self._known = [node.now for node in self.nodes]
        self._allow_fences()

    def rest(self) -> None:
        """Prepare the nodes for the next test. Both must join, and have no lease, no claim and no logged error.

        A node that the test has killed or stopped goes on. Leases of a daemon that was killed are revoked, because
        their tenants may have lost it.
        """
        # Caught exceptions keep frames, and so leases and connections, alive in reference cycles.
        gc.collect()
        for node in self.nodes:
            if node.now.process.poll() is None:
                os.kill(node.now.process.pid, signal.SIGCONT)
            else:
                node.start()
        self._allow_fences()
        for node, known in zip(self.nodes, self._known, strict=True):
            node.wait_until_joined()
            if node.now is not known:
                for lease in node.now.leases():
                    node.now.revoke(int(lease["lease_id"], 16))
            assert not node.now.trouble(), node.logs()
        wait_until(lambda: not self._leases(), "no lease is left", seen=self._leases)
        wait_until(lambda: not claims(self.cluster), "no claim is orphaned", seen=lambda: claims(self.cluster))
        self._known = [node.now for node in self.nodes]

    def _allow_fences(self) -> None:
        for node in self.nodes:
            node.now.allowed_trouble.append(FENCED)

    def _leases(self) -> list[dict[str, Any]]:
        return [lease for node in self.nodes for lease in node.now.leases()]

    def stop(self) -> None:
        self._stack.close()


def lent_fleet(fleets: list[LastingFleet], folder: Path, *, with_directory: bool = False) -> Iterator[LastingFleet]:
    """Lend a test the fleet in `fleets`, which starts with the first test. After a failed test, another is started."""
    if not fleets:
        fleets.append(LastingFleet(folder, with_directory=with_directory))
    (lasting,) = fleets
    yield lasting
    try:
        lasting.rest()
    except BaseException:
        fleets.clear()
        lasting.stop()
        raise


def stop_fleets() -> Iterator[list[LastingFleet]]:
    """Yield an empty list for `lent_fleet`. At the end, the fleet in it must stop cleanly."""
    fleets: list[LastingFleet] = []
    yield fleets
    for lasting in fleets:
        lasting.stop()
