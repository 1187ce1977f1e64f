"""A fleet of real daemons on a real etcd: nodes that can be killed, stopped and cut off."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gpulease.client import GpuBuilder, GpuLease, GpuLeaseError, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.daemon.fleet.records.fleet_records import GENERATION
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster
from helpers.kernels import TRANSFORM, scale_args
from helpers.lasting import LastingDaemon
from helpers.waiting import wait_until

HORIZON_S: Final = 10
FLEET_PROCESS: Final = "gpul-fleet"

FENCED: Final = "the fleet has declared this node dead"
"""Part of the message that a fenced node logs."""

BETWEEN_ROUNDS_S: Final = 0.02
"""Pause between rounds of a tenant, so that other tests get the processor.

It is short compared with the time from a name's end to its next grant, and long compared with a round.
"""


class FleetNode(LastingDaemon):
    """A node of a fleet, with leases that outlive its daemon."""

    def __init__(
        self,
        cluster: EtcdCluster,
        node_id: str,
        *,
        within: Sequence[str] = (),
        log_format: str = "human",
        driver: str = "cpu",
        tenants: str = "",
        state: Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(within=within, log_format=log_format, driver=driver, state=state)
        table = {"etcd": "etcd://" + ",".join(cluster.endpoints), "node": node_id, "horizon_s": HORIZON_S}
        # The node's tenants run on this host, so they reach it by its Unix socket.
        table |= {"addresses": [self.address], **settings}
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())
        self.config += f"[fleet]\n{lines}\n{tenants}"
        self.node_id = node_id

    def builder(self, name: str = "") -> GpuBuilder:
        """Return a builder for a small lease, with a name if one is given."""
        builder = GpuBuilder(self.address).min_vram(1 << 20).lease_secs(600)
        return builder.name(name) if name else builder

    def fleet_check(self) -> dict[str, Any]:
        """Return the fleet's check in the node's health report."""
        checks = ask(Opcode.HEALTH, Empty(), self.address).report["checks"]
        return next(check for check in checks if check["check"] == "fleet")

    def wait_until_joined(self) -> None:
        """Return when the node has joined and is not cut off."""
        wait_until(lambda: not self.fleet_check()["detail"], f"{self.node_id} has joined", seen=self.logs)

    def wait_until_isolated(self) -> None:
        """Return when the node's membership deadline has passed."""
        wait_until(lambda: self.fleet_check()["detail"], f"{self.node_id} is cut off", seen=self.logs)

    def fleet_pid(self) -> int:
        return wait_until(lambda: self.workers().get(FLEET_PROCESS, 0), "the fleet process runs")

    def acquire(self, name: str) -> GpuLease:
        """Acquire a lease with this name. Retries until the name is free."""
        got: list[GpuLease] = []
        refusals: list[str] = []

        def try_once() -> bool:
            try:
                got.append(self.builder(name).acquire())
            except GpuLeaseError as error:
                refusals.append(str(error))
                time.sleep(HORIZON_S / 50)
            return bool(got)

        wait_until(try_once, f"{self.node_id} serves {name}", seen=lambda: (refusals[-3:], self.logs()))
        return got[0]


class Worker:
    """A tenant that computes in a lease's session until the lease ends, and records how and when that happens."""

    def __init__(self, lease: GpuLease) -> None:
        self.spans: list[tuple[float, float]] = []
        self.error: GpuLeaseError | None = None
        self._lease = lease
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with GpuSession(self._lease) as session:
                module, buffer = session.module_load(TRANSFORM), session.mem_alloc(4096)
                args = scale_args(buffer, 1024, 1)
                while not self._is_over.wait(BETWEEN_ROUNDS_S):
                    began_s = time.monotonic()
                    session.launch(module, "scale", [4], [256], args)
                    session.sync()
                    self.spans.append((began_s, time.monotonic()))
        except GpuLeaseError as error:
            self.error = error

    def wait_until_working(self) -> None:
        wait_until(lambda: self.spans or self.error, "a kernel has run")
        assert self.error is None, self.error

    def wait_for_end(self) -> GpuLeaseError:
        self._thread.join(120)
        assert self.error is not None
        return self.error

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@contextlib.contextmanager
def fleet(
    folder: Path, nodes: int = 2, members: int = 1, **settings: Any
) -> Iterator[tuple[EtcdCluster, list[FleetNode]]]:
    """Yield a cluster of etcd and the nodes, which have joined."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(EtcdCluster(folder, members))
        # Without this key, the first node of a new store would wait for a horizon, because an earlier store may have
        # been lost.
        cluster.control("put", GENERATION.decode(), "made by the test")
        made = []
        for number in range(nodes):
            node = FleetNode(cluster, f"node-{number}", **settings)
            stack.callback(_end, node)
            node.start()
            made.append(node)
        for node in made:
            node.wait_until_joined()
        yield cluster, made


def _end(node: FleetNode) -> None:
    """Stop a node, which may already be stopped or killed, and remove its processes and files."""
    if node.now.process.poll() is None:
        os.kill(node.now.process.pid, signal.SIGCONT)
    else:
        node.start()
    # It may have been fenced in the meantime.
    node.now.allowed_trouble.append(FENCED)
    node.stop()


def quota(cluster: EtcdCluster, *words: str) -> str:
    """Run `gpulease fleet quota`, and return its output."""
    etcd = f"etcd://{','.join(cluster.endpoints)}"
    command = [sys.executable, "-P", "-m", "gpulease.client.cli", "fleet", "quota", *words, "--etcd", etcd]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=python_environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def counted_bytes(cluster: EtcdCluster) -> dict[str, int]:
    """Return the bytes of quotas that leases use, by node."""
    told = cluster.control("get", "--prefix", "/gpulease/v1/quotas/", "--print-value-only")
    entries = [entry for line in told.splitlines() if line for entry in json.loads(line)["used"].values()]
    used: dict[str, int] = {}
    for node_id, _, size_bytes in entries:
        used[node_id] = used.get(node_id, 0) + size_bytes
    return used


def claims(cluster: EtcdCluster) -> dict[str, dict[str, Any]]:
    told = cluster.control("get", "--prefix", "/gpulease/v1/names/")
    lines = [line for line in told.splitlines() if line]
    return {key.rpartition("/")[2]: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}
