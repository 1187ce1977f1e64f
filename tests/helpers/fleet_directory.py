"""Real directory processes of a fleet. Tests write the nodes' records to a real etcd."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from gpulease.daemon.fleet.records.fleet_records import (
    HORIZON,
    CardRecord,
    ClaimRecord,
    InventoryRecord,
    NodeRecord,
    inventory_key,
    name_key,
    node_key,
)
from helpers.daemon import FOLDER, Daemon, python_environment
from helpers.etcd_cluster import EtcdCluster
from helpers.waiting import wait_until

STOP_LIMIT_S: Final = 60.0
MANY_SECONDS: Final = "600"
"""The longest horizon. With it, a node whose record a test writes only once does not count as silent."""

_LISTENS: Final = re.compile(r"(?:address=|listens on |\"address\":\")((?:tls|tcp|unix):[^\s\"]+)")


class Directory:
    """A directory's process. Use it as a context manager.

    Attributes:
        address: Its first address.
        folder: Its files. The process has this path in its environment, like those of `Daemon`.
    """

    def __init__(
        self,
        cluster: EtcdCluster,
        folder: Path,
        *options: str,
        listen: Sequence[str] = (),
        horizon_s: str = MANY_SECONDS,
    ) -> None:
        """Write the fleet's horizon to etcd, as its first node would do, unless there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # Nodes that have joined have written the horizon.
        if not cluster.control("get", HORIZON.decode()):
            cluster.control("put", HORIZON.decode(), horizon_s)
        self._listen = list(listen) or [f"unix:{folder / 'directory.sock'}"]
        self._log_path = folder / "log"
        self._command = [sys.executable, "-P", "-m", "gpulease.daemon.fleet.directory"]
        self._command += ["--etcd", f"etcd://{','.join(cluster.endpoints)}", *options]
        self._command += [word for address in self._listen for word in ("--listen", address)]
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment() | {FOLDER: str(self.folder)},
            )
        try:
            found = wait_until(self._addresses, "the directory listens", seen=self.log)
        except BaseException:
            self.__exit__()
            raise
        self.address = found[0]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
            self.process = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.log().count(text) >= times, f"the directory logs {text!r}", seen=self.log)

    def _addresses(self) -> list[str]:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        found = _LISTENS.findall(self.log())
        return found if len(found) == len(self._listen) else []


def record_of(*addresses: str, free_bytes: int = 4 << 30, capacity_bytes: int = 6 << 30) -> InventoryRecord:
    card = CardRecord("GPU-of-the-record", "a card", capacity_bytes, free_bytes, 0, False)
    return InventoryRecord(addresses, {}, (card,))


def put_node(cluster: EtcdCluster, node_id: str, record: InventoryRecord) -> None:
    """Write a node's inventory and its record, as its fleet process would."""
    for key, value in ((inventory_key(node_id), record), (node_key(node_id), NodeRecord("nonce"))):
        cluster.control("put", key.decode(), value.encode().decode())


def put_claim(cluster: EtcdCluster, name: str, node_id: str, incarnation: int) -> None:
    claim = ClaimRecord(node_id, incarnation, "0123456789abcdef" * 2, "ann", "nonce")
    cluster.control("put", name_key(name).decode(), claim.encode().decode())


def put_daemon(cluster: EtcdCluster, node_id: str, daemon: Daemon, **members: object) -> None:
    """Write the record of a real daemon that runs without a fleet process."""
    record = replace(record_of(daemon.address, free_bytes=daemon.available_bytes()), **members)  # type: ignore[arg-type]
    put_node(cluster, node_id, record)
