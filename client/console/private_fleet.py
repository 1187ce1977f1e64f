"""A fleet on this host that ends with its command: a real etcd, daemons on the embedded driver, a directory."""

import base64
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.fleet_listing import listing_of
from gpulease.client.console.private_daemon import SOCKET_NAME, PrivateDaemon, PrivateServer
from gpulease.client.core.lease_request import fleet_of
from gpulease.client.errors import Disconnected
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass

ETCD: Final = "etcd"
INSTALL: Final = "install it, for example with `apt install etcd-server`, or from etcd.io"
ETCD_START_S: Final = 60.0
"""Longest time until etcd has a leader, in seconds."""

ETCD_ANSWER_S: Final = 5.0
JOIN_S: Final = 90.0
"""Longest time until nodes are members and a directory lists them, in seconds."""

GENERATION: Final = b"/gpulease/v1/generation"
"""Key of the store's generation. If the key exists, a node joins without first waiting for a membership deadline: this
store is new and has lost nothing."""

DIRECTORY_MODULE: Final = "gpulease.daemon.fleet.directory"

_POLL_S: Final = 0.05


@dataclass(slots=True)
class EtcdMember:
    """A member of etcd: its HOST:PORT for clients, and its process."""

    endpoint: str
    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """The member's process, to be killed or measured."""
        return self.process.pid

    def kill(self) -> None:
        """Kill the member, as if its host were lost."""
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, **body: str) -> dict[str, Any]:
        """Send a request to etcd's HTTP gateway. Raises OSError, HTTPException or ValueError without an answer."""
        # etcd's gateway takes JSON over HTTP/1.1, so no client library is needed.
        connection = http.client.HTTPConnection(self.endpoint, timeout=ETCD_ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"etcd answered {response.status}")
        return answer


def leader_of(members: Sequence[EtcdMember]) -> EtcdMember | None:
    """The member that reports itself as the leader; None if there is none at present."""
    for member in members:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            status = member.ask("/v3/maintenance/status")
            # A member without a leader omits the field: JSON leaves out a zero.
            if status.get("leader") == status["header"]["member_id"]:
                return member
    return None


def etcd_program() -> str:
    """Path of the program etcd. Raises MissingPrerequisite if it is not installed."""
    program = shutil.which(ETCD)
    if program is None:
        raise MissingPrerequisite(f"etcd is not installed: {INSTALL}")
    return program


@contextlib.contextmanager
def private_etcd(folder: Path, count: int = 1) -> Iterator[list[EtcdMember]]:
    """Run an etcd of `count` members with its data in a new folder; yields them. Raises MissingPrerequisite."""
    program = etcd_program()
    # Each member has a port for clients and one for its peers, known to all members in advance.
    ports = _free_ports(2 * count)
    urls = [(f"http://127.0.0.1:{ports[2 * n]}", f"http://127.0.0.1:{ports[2 * n + 1]}") for n in range(count)]
    cluster = ",".join(f"m{number}={peer}" for number, (_, peer) in enumerate(urls))
    members: list[EtcdMember] = []
    with contextlib.ExitStack() as stack:
        for number, (client, peer) in enumerate(urls):
            member_folder = folder / f"m{number}"
            member_folder.mkdir(parents=True)
            command = [program, "--name", f"m{number}", "--data-dir", str(member_folder / "data")]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", cluster, "--log-level", "error", "--logger", "zap"]
            log = stack.enter_context((member_folder / "log").open("ab"))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            members.append(EtcdMember(client.removeprefix("http://"), process))
            stack.callback(members[-1].kill)
        _mark_new_fleet(members, folder)
        yield members


def _mark_new_fleet(members: list[EtcdMember], folder: Path) -> None:
    """Write the fleet's generation as soon as there is a leader."""
    until_s = time.monotonic() + ETCD_START_S
    while (leader := leader_of(members)) is None:
        # A member that has ended will not start on its own: report its last line now.
        ended = [number for number, member in enumerate(members) if member.process.poll() is not None]
        if ended or time.monotonic() > until_s:
            log_lines = (folder / f"m{ended[0] if ended else 0}" / "log").read_text(errors="replace").splitlines()
            raise MissingPrerequisite(f"etcd does not start: {log_lines[-1] if log_lines else 'it printed nothing'}")
        time.sleep(_POLL_S)
    key, value = (base64.b64encode(text).decode() for text in (GENERATION, b"a private fleet"))
    leader.ask("/v3/kv/put", key=key, value=value)


def _free_ports(count: int) -> list[int]:
    # Ask the kernel for free ports, all at once, so that no two are the same.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in sockets]


class PrivateFleet:
    """Nodes and a directory on one etcd. Use it as a context: their processes end with it.

    Attributes:
        nodes: The daemons, node-1 first.
        address: The fleet's address for tenants, after `open_directory`.
    """

    def __init__(self, folder: Path, endpoints: Sequence[str], horizon_s: int) -> None:
        self.nodes: list[PrivateDaemon] = []
        self.address = ""
        self._folder, self._endpoints, self._horizon_s = folder, endpoints, horizon_s
        self._directory: PrivateServer | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "PrivateFleet":
        return self

    def __exit__(self, *_: object) -> None:
        # Ask all nodes to stop before waiting for any, so that they stop concurrently.
        for node in self.nodes:
            # A crashed daemon gets no signal; `end_all` starts it again.
            if not node.has_crashed:
                node.ask_to_stop()
        self._stack.close()

    def add(self, count: int, endpoints_of_first: Sequence[str] = ()) -> None:
        """Start further daemons; the first of them may use other endpoints of etcd. Raises MissingPrerequisite."""
        new: list[PrivateDaemon] = []
        # Start all first, then wait for all: they start concurrently.
        for _ in range(count):
            etcd = ",".join((endpoints_of_first if not new else ()) or self._endpoints)
            node_id = f"node-{len(self.nodes) + 1}"
            node_folder = self._folder / node_id
            node_folder.mkdir()
            # The folder's socket is the node's address in the directory.
            table = f'[fleet]\netcd = "etcd://{etcd}"\nnode = "{node_id}"\nhorizon_s = {self._horizon_s}\n'
            node = lasting_daemon(node_folder, f'{table}addresses = ["unix:{node_folder / SOCKET_NAME}"]\n')
            self._stack.callback(end_all, node)
            node.begin()
            new.append(node)
            self.nodes.append(node)
        for node in new:
            node.await_answer()

    def open_directory(self, placement: str = "pack") -> None:
        """Start the directory, and return immediately."""
        directory_folder = self._folder / "directory"
        directory_folder.mkdir()
        options = ["--etcd", f"etcd://{','.join(self._endpoints)}"]
        # The directory answers once it has read the store; `await_nodes` waits for that.
        directory = PrivateServer(directory_folder, DIRECTORY_MODULE, [*options, "--placement", placement])
        self._stack.callback(directory.stop)
        directory.begin()
        self._directory = directory
        self.address = f"fleet:{directory.address}"

    def await_nodes(self) -> None:
        """Wait until the directory lists all nodes. Raises MissingPrerequisite."""
        fleet = fleet_of(self.address)
        if fleet is None or self._directory is None:
            raise ValueError("open_directory must be called first")
        self._directory.await_answer()
        until_s = time.monotonic() + JOIN_S
        node_count, problem = 0, "it lists none"
        # Count the nodes that are not silent. An error means only that the directory is not ready.
        while node_count < len(self.nodes):
            if time.monotonic() > until_s:
                raise MissingPrerequisite(
                    f"the directory lists {node_count} of {counted(len(self.nodes), 'node')} "
                    f"after {JOIN_S:g} s: {problem}"
                )
            time.sleep(_POLL_S)
            try:
                node_count = sum(not node["silent"] for node in listing_of(fleet)["nodes"])
            except Disconnected as error:
                problem = str(error)


def lasting_daemon(folder: Path, settings: str = "") -> PrivateDaemon:
    """Return a daemon that will keep its leases in this folder; `end_all` ends it."""
    return PrivateDaemon(folder, ["--driver", "cpu"], f'state = "{folder / "state"}"\n{settings}')


def end_all(daemon: PrivateDaemon) -> None:
    """Stop a daemon. If it has crashed, start it again first, so that it ends its remaining leases."""
    try:
        if daemon.has_crashed:
            daemon.start()
    finally:
        daemon.stop()
