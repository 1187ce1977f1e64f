"""`gpulease demo --fleet`: three daemons and a real etcd; a node is killed, and its name lives on at another."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulease.client import GpuBuilder, GpuLease, GpuLeaseError, GpuSession, KernelArgs
from gpulease.client.cli.exit_status import CannotStart
from gpulease.client.cli.private_daemon import SOCKET, PrivateDaemon, short_folder, unwound_by_signals

NODES: Final = 3
NAME: Final = "model-a"
SLICE_BYTES: Final = 64 << 20
VALUES: Final = 1024
HORIZON_S: Final = 4
"""The fleet's horizon here: a dead node's names are free one horizon after its last beat. The default is 30 s."""

JOIN_S: Final = 60.0
LEASE_S: Final = 300
WORK_PAUSE_S: Final = 0.005
KERNELS: Final = 100
"""Kernels that run at the second node before the demonstration ends."""

ETCD: Final = "etcd"
INSTALL: Final = "install it, as by `apt install etcd-server`, or from etcd.io"


@dataclass(slots=True)
class Work:
    """Kernels that a tenant ran in one session and waited for, each from its launch to its end.

    Attributes:
        spans: Monotonic seconds.
        end: How the session ended, in words.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    end: str = ""


class Tenant:
    """A tenant that computes in one lease's session until the session ends or it is told to stop."""

    def __init__(self, lease: GpuLease, ptx: bytes) -> None:
        self.work = Work()
        self._lease = lease
        self._ptx = ptx
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenant")

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def stop(self) -> None:
        """Compute no more."""
        self._is_over.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until the session has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with GpuSession(self._lease) as session:
                module, buffer = session.module_load(self._ptx), session.mem_alloc(4 * VALUES)
                args = KernelArgs().push_buffer(buffer).push_u32(VALUES).push_f32(1.0)
                while not self._is_over.wait(WORK_PAUSE_S):
                    began_s = time.monotonic()
                    session.launch(module, "bias", [4], [256], args)
                    session.sync()
                    self.work.spans.append((began_s, time.monotonic()))
        except GpuLeaseError as error:
            self.work.end = f"{type(error).__name__}: {error}"


def overlaps(first: Work, second: Work) -> int:
    """Return how many pairs of both sessions' kernels ran at one time."""
    return sum(a < d and c < b for a, b in first.spans for c, d in second.spans)


def run_fleet_demo(ptx: bytes, say: Callable[[str], Any]) -> dict[str, Any]:
    """Run the demonstration, and return its report. Raises CannotStart or GpuLeaseError."""
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="gpulease-", dir=short_folder()) as name:
        folder = Path(name)
        with _etcd(folder / "etcd") as endpoint, _nodes(folder, endpoint) as nodes:
            say(f"Fleet    {NODES} daemons on the embedded driver, one etcd at {endpoint}, a horizon of {HORIZON_S} s")
            return _fail_over(nodes, ptx, say)


def _fail_over(nodes: list[PrivateDaemon], ptx: bytes, say: Callable[[str], Any]) -> dict[str, Any]:
    first = _acquire(nodes[0].address, wait_s=JOIN_S)
    say(f"Named    node-1 serves {NAME} under epoch {first.epoch}: lease {first.lease_id_text}")
    before = Tenant(first, ptx)
    before.start()
    refused = _refusal(nodes[1].address)
    say(f"Refused  at node-2: {refused}")
    nodes[0].kill()
    killed_s = time.monotonic()
    say("Killed   node-1's daemon, by SIGKILL; its session goes on until the horizon that the daemon wrote last")
    second = _acquire(nodes[1].address, wait_s=JOIN_S)
    back_s = time.monotonic() - killed_s
    after = Tenant(second, ptx)
    after.start()
    before.join()
    while len(after.work.spans) < KERNELS and not after.work.end:
        time.sleep(WORK_PAUSE_S)
    after.stop()
    ended_s = before.work.spans[-1][1] - killed_s
    say(f"Ended    node-1's session {ended_s:.1f} s after the kill: {before.work.end}")
    say(f"Back     node-2 serves {NAME} {back_s:.1f} s after the kill under epoch {second.epoch}")
    count = overlaps(before.work, after.work)
    say(f"Overlaps {count}: {len(before.work.spans)} kernels before, {len(after.work.spans)} after")
    second.free()
    return {
        "nodes": NODES,
        "name": NAME,
        "horizon_s": HORIZON_S,
        "epochs": [first.epoch, second.epoch],
        "refused": refused,
        "session_ended_after_s": round(ended_s, 3),
        "session_end": before.work.end,
        "served_again_after_s": round(back_s, 3),
        "kernels": [len(before.work.spans), len(after.work.spans)],
        "overlaps": count,
    }


def _acquire(address: str, wait_s: float) -> GpuLease:
    """Acquire the name, again and again while the node has not joined or the name is not free."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            builder = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(LEASE_S).name(NAME)
            return builder.timeout(max(1.0, until_s - time.monotonic())).acquire()
        except GpuLeaseError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(HORIZON_S / 20)


def _refusal(address: str) -> str:
    """Return what a tenant is told who wants the name while another node serves it."""
    until_s = time.monotonic() + JOIN_S
    while True:
        try:
            GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(LEASE_S).name(NAME).acquire().free()
        except GpuLeaseError as error:
            if "has the name" in str(error) or time.monotonic() >= until_s:
                return str(error)
            time.sleep(HORIZON_S / 20)
        else:
            raise CannotStart("two nodes serve one name: tell the authors")


@contextlib.contextmanager
def _etcd(folder: Path) -> Iterator[str]:
    """Run etcd with its data in a folder; yields HOST:PORT. Raises CannotStart."""
    program = shutil.which(ETCD)
    if program is None:
        raise CannotStart(f"etcd is not installed: {INSTALL}")
    folder.mkdir()
    client, peer = _free_ports(2)
    urls = {"client": f"http://127.0.0.1:{client}", "peer": f"http://127.0.0.1:{peer}"}
    command = [program, "--name", "m1", "--data-dir", str(folder / "data"), "--log-level", "error"]
    command += ["--listen-client-urls", urls["client"], "--advertise-client-urls", urls["client"]]
    command += ["--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", urls["peer"]]
    command += ["--initial-cluster", f"m1={urls['peer']}"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{client}"
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def _nodes(folder: Path, endpoint: str) -> Iterator[list[PrivateDaemon]]:
    """Run the daemons. One that was killed is started again at the end, which ends what it left."""
    nodes = []
    with contextlib.ExitStack() as stack:
        for number in range(1, NODES + 1):
            home = folder / f"node-{number}"
            home.mkdir()
            settings = f'state = "{home / "state"}"\n[fleet]\netcd = "etcd://{endpoint}"\nnode = "node-{number}"\n'
            # All are on this host, and so are their tenants.
            settings += f'addresses = ["unix:{home / SOCKET}"]\n'
            node = PrivateDaemon(home, ["--driver", "cpu"], f"{settings}horizon_s = {HORIZON_S}\n")
            stack.callback(_end, node)
            node.start()
            nodes.append(node)
        yield nodes


def _end(node: PrivateDaemon) -> None:
    if not node.is_running:
        node.start()
    node.stop()
