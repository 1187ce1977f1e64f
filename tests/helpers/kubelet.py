"""A simulated kubelet, with the calls that a DRA driver receives.

Messages are encoded here with the field numbers of the kubelet's .proto files, without the driver's descriptors. If
both sides used the driver's descriptors, a wrong number there would not be detected.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from helpers.containers import run_container
from helpers.control_plane import ControlPlane
from helpers.daemon import Daemon, python_environment
from helpers.kubernetes_api import ACCOUNT_TOKEN, KubernetesApi
from helpers.waiting import PATIENCE_S, wait_until

DRIVER = "dra.gpulease.internal"
NODE = "node-a"
_KIND = {"apiVersion": "gpulease.internal/v1", "kind": "LeaseParameters"}
POD_USER = os.getuid() or 12345
"""The user that pods run as. Without root, this is the user who runs the test."""


def encode(*fields: tuple[int, str | bytes]) -> bytes:
    """Return a protobuf message of length-delimited fields."""
    parts = []
    for number, value in fields:
        data = value.encode() if isinstance(value, str) else value
        parts += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(parts)


def decode(data: bytes) -> dict[int, list[bytes]]:
    """Return the fields of such a message by number."""
    found: dict[int, list[bytes]] = {}
    place = 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        assert tag & 7 == 2, data
        size, place = _read_varint(data, place)
        found.setdefault(tag >> 3, []).append(data[place : place + size])
        place += size
    return found


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not data[place - 1] & 0x80:
            return value, place


@dataclass(frozen=True)
class Claim:
    """A ResourceClaim to which the scheduler has allocated parts of cards.

    Attributes:
        parts: For each request, the device and the part's size, which may be None; for a request of several devices, a
            list of them.
        configs: Parameters for some of the requests, in addition to `parameters`: (names of the requests, parameters).
        admin: The requests that have administrator access.
    """

    parts: dict[str, tuple[str, str | None] | list[tuple[str, str | None]]]
    name: str = "claim"
    namespace: str = "default"
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    parameters: dict[str, Any] = field(default_factory=lambda: {"user": POD_USER})
    configs: tuple[tuple[list[str], dict[str, Any]], ...] = ()
    admin: tuple[str, ...] = ()
    pool: str = "node-a"
    pod_claim: str = ""

    def as_object(self) -> dict[str, Any]:
        """Return the claim as the API server returns it."""
        results = [
            {"request": request, "driver": DRIVER, "pool": self.pool, "device": device, "shareID": str(uuid.uuid4())}
            | ({} if size is None else {"consumedCapacity": {"vram": size}})
            | ({"adminAccess": True} if request in self.admin else {})
            for request, parts in self.parts.items()
            for device, size in (parts if isinstance(parts, list) else [parts])
        ]
        config = [
            {"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": _KIND | parameters}}
            | ({"requests": requests} if requests else {})
            for requests, parameters in (([], self.parameters), *self.configs)
        ]
        annotations = {"resource.kubernetes.io/pod-claim-name": self.pod_claim} if self.pod_claim else {}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": self.name, "namespace": self.namespace, "uid": self.uid, "annotations": annotations},
            "spec": {"devices": {}},
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        }


@dataclass(frozen=True)
class Device:
    """A prepared device, as the driver reports it."""

    requests: list[str]
    pool: str
    name: str
    cdi_ids: list[str]
    share_id: str


class CallFailed(Exception):
    """The call itself failed. The text contains gRPC's status."""


class Kubelet:
    def __init__(self, socket: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "helpers.kubelet_calls", str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=python_environment(),
        )

    def connect(self, socket: str) -> None:
        """Direct the following calls to another socket."""
        self._do(f"socket {socket}")

    def call(self, method: str, request: bytes = b"") -> bytes:
        return bytes.fromhex(self._do(f"{method} {request.hex()}"))

    def _do(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        outcome, _, rest = self._process.stdout.readline().strip("\n").partition(" ")
        if outcome != "ok":
            raise CallFailed(rest)
        return rest

    def _ask(self, verb: str, claims: tuple[Claim, ...], version: str) -> dict[str, dict[int, list[bytes]]]:
        request = encode(
            *((1, encode((1, claim.namespace), (2, claim.uid), (3, claim.name))) for claim in claims),
        )
        answer = self.call(f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/Node{verb}Resources", request)
        entries = map(decode, decode(answer).get(1, []))
        return {entry[1][0].decode(): decode(entry.get(2, [b""])[0]) for entry in entries}

    def prepare(self, claim: Claim, version: str = "v1") -> list[Device] | str:
        """Return a claim's devices, or the driver's error."""
        (found,) = self._ask("Prepare", (claim,), version).items()
        assert found[0] == claim.uid
        if 2 in found[1]:
            return found[1][2][0].decode()
        devices = []
        for data in found[1].get(1, []):
            texts = {number: [value.decode() for value in values] for number, values in decode(data).items()}
            (pool,), (name,), (share_id,) = texts[2], texts[3], texts.get(5, [""])
            devices.append(Device(texts[1], pool, name, texts[4], share_id))
        return devices

    def unprepare(self, claim: Claim, version: str = "v1") -> str:
        """Unprepare a claim. Returns the driver's error; "" if it succeeded."""
        (found,) = self._ask("Unprepare", (claim,), version).items()
        assert found[0] == claim.uid
        return found[1].get(1, [b""])[0].decode()

    def drop(self) -> None:
        """Kill the process that makes the calls, which closes its connection in the middle of a call."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Node:
    """A driver's process for one daemon, with the kubelet that calls it and the API server that it uses.

    Args:
        control_plane: A real API server. Without it, there is a simulated one, which is `api`.

    Attributes:
        stuck: A file. While it exists, a driver that was started with `may_hang` waits when it writes its records, and
            says so in the file.
    """

    def __init__(
        self,
        daemon: Daemon,
        *options: str,
        may_hang: bool = False,
        name: str = NODE,
        confined: Callable[[Path], list[str]] = lambda _: [],
        control_plane: ControlPlane | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.daemon = daemon
        self.name = name
        self._options = options
        self._uid = ""
        self._prefix = confined(daemon.folder / "k")
        self.folder = daemon.folder / "k"
        self.stuck = self.folder / "stuck"
        self._module = (
            ("helpers.faulty_driver", str(self.stuck)) if may_hang else ("gpulease.client.integrations.kubernetes",)
        )
        self.cdi = self.folder / "cdi"
        self.folder.mkdir()
        # Pods run as other users, which must be able to reach the socket.
        daemon.folder.chmod(0o711)
        self._control_plane = control_plane
        if control_plane is None:
            (self.folder / "account").write_text(ACCOUNT_TOKEN + "\n")
            self.api = KubernetesApi(self.name)
            self._stack.callback(self.api.close)
            self._server = ["--api-server", self.api.url, "--api-token", str(self.folder / "account")]
        else:
            self._server = ["--api-server", control_plane.url, "--api-ca", str(control_plane.ca)]
            self._server += ["--api-token", str(control_plane.driver_token(name))]
        self.start()

    @classmethod
    @contextmanager
    def instance(cls, node: "Node", uid: str) -> Iterator["Node"]:
        """Yield an additional driver of the node, as in a rolling update: the driver in the pod with that uid."""
        made = copy(node)
        made._options = (*node._options, "--pod-uid", uid)
        made._uid = uid
        made.start()
        try:
            yield made
        finally:
            if made.process.poll() is None:
                made.stop()

    @property
    def state(self) -> Path:
        """The folder with the driver's own files."""
        return self.folder / "plugins" / DRIVER / "state"

    @property
    def command(self) -> list[str]:
        return [
            *self._prefix,
            *(sys.executable, "-P", "-m", *self._module, "serve"),
            *("--node", self.name, "--daemon", self.daemon.address),
            *("--kubelet", str(self.folder), "--cdi", str(self.cdi)),
            *self._server,
            *self._options,
        ]

    @property
    def sockets(self) -> tuple[Path, Path]:
        part = f"-{self._uid}" if self._uid else ""
        registration = self.folder / "plugins_registry" / f"{DRIVER}{part}-reg.sock"
        return self.folder / "plugins" / DRIVER / f"dra{part}.sock", registration

    def start(self) -> None:
        self._log = (self.folder / "log").open("a+")
        watches = 0 if self._control_plane else self.api.watches
        begun = self.log().count(": serves ")
        self.process = subprocess.Popen(
            self.command,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env=python_environment(),
        )

        def serves() -> bool:
            assert self.process.poll() is None, self.log()
            return self.log().count(": serves ") > begun

        wait_until(serves, "the driver serves", seen=self.log)
        if self._control_plane is None:
            wait_until(lambda: self.api.watches > watches, "the driver watches its slices", seen=self.log)
        self.connect()

    def connect(self) -> None:
        """Start a kubelet, which finds the driver's service by the driver's registration."""
        self.kubelet = Kubelet(self.sockets[1])
        info = decode(self.kubelet.call("/pluginregistration.Registration/GetInfo"))
        assert info[1] == [b"DRAPlugin"]
        assert info[2] == [DRIVER.encode()]
        services = [b"v1.DRAPlugin", b"v1beta1.DRAPlugin", b"v1.DRAResourceHealth", b"v1alpha1.DRAResourceHealth"]
        assert info[4] == services
        registered = b"\x08\x01"
        assert self.kubelet.call("/pluginregistration.Registration/NotifyRegistrationStatus", registered) == b""
        self.kubelet.connect(info[3][0].decode())

    def stop(self, *, kill: bool = False) -> None:
        """Stop the driver, cleanly or with SIGKILL as in a crash. Prepared claims remain."""
        self.kubelet.close()
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        assert kill or status == 0, self.log()
        self._log.close()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def spec(self, claim: Claim) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cdi_spec_of(claim).read_text())
        return found

    def cdi_spec_of(self, claim: Claim) -> Path:
        return self.cdi / f"gpulease-{claim.uid}.json"

    def lease_ids(self, claim: Claim) -> list[int]:
        """Return the leases of a prepared claim, as the driver has recorded them."""
        record = json.loads((self.state / "claims" / f"{claim.uid}.json").read_text())
        return [int(device["lease_id"], 16) for device in record["devices"] if device["lease_id"]]

    def run(
        self, program: str, *parts: "tuple[Claim, list[Device]]", user: int = POD_USER
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a container with these devices of these claims."""
        specs = [self.spec(claim) for claim, _ in parts]
        ids = [cdi_id for _, devices in parts for device in devices for cdi_id in device.cdi_ids]
        return run_container(specs, ids, program, user, self.daemon.socket_path.stat().st_gid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self._stack.close()
