"""The services that the kubelet calls over Unix sockets: plugin registration, DRA, and devices' health.

Message classes are built from the descriptors below, without a .proto compiler. The kubelet's `pkg/apis/dra`,
`pkg/apis/dra-health` and `pkg/apis/pluginregistration` define the fields' numbers. DRA v1 differs from v1beta1 only in
`share_id`. The two versions of the health service differ only in their names.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from gpulease.client.http.unix_path import file_at, remove_abandoned, remove_path

DRA_VERSIONS: Final = ("v1", "v1beta1")
"""The supported versions of the DRA service, newest first. The kubelet chooses one."""

HEALTH_VERSIONS: Final = ("v1", "v1alpha1")
"""The supported versions of the health service, newest first. A kubelet uses the service if its feature gate
ResourceHealthStatus is on."""

HEALTH_S: Final = 10.0
"""Seconds between two reports of unchanged health. A change is reported within HEALTH_POLL_S."""

HEALTH_POLL_S: Final = 1.0

HEALTH_TIMEOUT_S: Final = 30
"""Seconds after the last report from which the kubelet treats a device's health as unknown."""

MAX_HEALTH_WATCHES: Final = 4
"""Maximum number of open health streams. Each takes a thread, and a kubelet needs one."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Maximum bytes of a request. A request has the claims of one pod, with a few hundred bytes each."""

MAX_CLAIMS: Final = 256
"""Maximum number of claims in one request. A pod has a few claims."""

SERVICE_THREADS: Final = 8
"""Number of requests that are served at the same time. A request may wait long for the proof that memory is free."""

STOP_LIMIT_S: Final = 5.0
"""Maximum seconds for requests in flight when the driver stops."""

_STRING: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BOOL: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_INT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_ENUM: Final = descriptor_pb2.FieldDescriptorProto.TYPE_ENUM
_MESSAGE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_ONE: Final = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_REPEATED: Final = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A claim's reference as the kubelet sent it, without any check."""

    namespace: str
    uid: str
    name: str


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """A part of a card that is prepared for one request of a claim. `cdi_id` is the name of its CDI device."""

    request: str
    pool: str
    device: str
    cdi_id: str
    share_id: str


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """A device's health; None for `is_healthy` if it is unknown."""

    pool: str
    device: str
    is_healthy: bool | None
    message: str = ""


class DraDriver(Protocol):
    """The interface that prepares and unprepares claims. The texts of its errors are shown in the pod's events."""

    def prepare(self, ref: ClaimRef) -> list[PreparedDevice]:
        """Prepare a claim's devices. A repeated call returns the same devices."""

    def unprepare(self, ref: ClaimRef) -> None:
        """Return once the claim holds no device. A repeated call does nothing."""


# --- messages ---


def _field(name: str, number: int, kind: str | int = _STRING, label: int = _ONE) -> dict[str, Any]:
    field = {"name": name, "number": number, "label": label}
    return field | ({"type": kind} if isinstance(kind, int) else {"type": _MESSAGE, "type_name": kind})


def _map_entry(name: str, value: str) -> descriptor_pb2.DescriptorProto:
    """Describe the message that protobuf generates for an entry of map<string, value>."""
    entry = descriptor_pb2.DescriptorProto(name=name)
    for field in (_field("key", 1), _field("value", 2, value)):
        entry.field.add(**field)
    entry.options.map_entry = True
    return entry


def _file(package: str, messages: Mapping[str, Iterable[dict[str, Any]]]) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        described = file.message_type.add(name=name)
        for field in fields:
            described.field.add(**field)
    return file


def _dra_file(version: str) -> descriptor_pb2.FileDescriptorProto:
    package = f"k8s.io.kubelet.pkg.apis.dra.{version}"
    claims = [_field("claims", 1, f".{package}.Claim", _REPEATED)]
    device = [
        _field("request_names", 1, label=_REPEATED),
        *(_field(name, number) for number, name in enumerate(("pool_name", "device_name"), 2)),
        _field("cdi_device_ids", 4, label=_REPEATED),
    ]
    messages = {
        "Claim": [_field("namespace", 1), _field("uid", 2), _field("name", 3)],
        "Device": device,
        "NodePrepareResourcesRequest": claims,
        "NodePrepareResourceResponse": [_field("devices", 1, f".{package}.Device", _REPEATED), _field("error", 2)],
        "NodeUnprepareResourcesRequest": claims,
        "NodeUnprepareResourceResponse": [_field("error", 1)],
    }
    file = _file(package, messages)
    # `map<string, NodePrepareResourceResponse> claims = 1` is a repeated nested message on the wire.
    for verb in ("Prepare", "Unprepare"):
        reply = file.message_type.add(name=f"Node{verb}ResourcesResponse")
        reply.nested_type.append(_map_entry("ClaimsEntry", f".{package}.Node{verb}ResourceResponse"))
        reply.field.add(**_field("claims", 1, f".{package}.{reply.name}.ClaimsEntry", _REPEATED))
    if version == "v1":
        # In proto3, an optional field is in a oneof of its own.
        (device_message,) = (message for message in file.message_type if message.name == "Device")
        device_message.oneof_decl.add(name="_share_id")
        device_message.field.add(**_field("share_id", 5), proto3_optional=True, oneof_index=0)
    return file


UNKNOWN, HEALTHY, UNHEALTHY = range(3)
"""The numbers of HealthStatus."""


def _health_file(version: str) -> descriptor_pb2.FileDescriptorProto:
    # The package's name is the version alone.
    health = [
        _field("device", 1, f".{version}.DeviceIdentifier"),
        _field("health", 2, _ENUM) | {"type_name": f".{version}.HealthStatus"},
        _field("last_updated_time", 3, _INT64),
        _field("health_check_timeout_seconds", 4, _INT64),
        _field("message", 5),
    ]
    messages = {
        "NodeWatchResourcesRequest": [],
        "DeviceIdentifier": [_field("pool_name", 1), _field("device_name", 2)],
        "DeviceHealth": health,
        "NodeWatchResourcesResponse": [_field("devices", 1, f".{version}.DeviceHealth", _REPEATED)],
    }
    file = _file(version, messages)
    status = file.enum_type.add(name="HealthStatus")
    for number, name in enumerate(("UNKNOWN", "HEALTHY", "UNHEALTHY")):
        status.value.add(name=name, number=number)
    return file


_REGISTRATION: Final = _file(
    "pluginregistration",
    {
        "InfoRequest": [],
        "PluginInfo": [
            *(_field(name, number) for number, name in enumerate(("type", "name", "endpoint"), 1)),
            _field("supported_versions", 4, label=_REPEATED),
        ],
        "RegistrationStatus": [_field("plugin_registered", 1, _BOOL), _field("error", 2)],
        "RegistrationStatusResponse": [],
    },
)

_POOL: Final = descriptor_pool.DescriptorPool()
for _described in (_REGISTRATION, *map(_dra_file, DRA_VERSIONS), *map(_health_file, HEALTH_VERSIONS)):
    _POOL.AddSerializedFile(_described.SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message by its full name, including the package."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def dra_message(version: str, name: str) -> Any:
    """Return the class of a message of one version of the DRA service."""
    return message(f"k8s.io.kubelet.pkg.apis.dra.{version}.{name}")


# --- services ---


def registration_socket(driver: str, registry: Path, instance: str) -> Path:
    """Return the socket at which a driver, or its instance in one pod, registers."""
    return registry / f"{driver}{f'-{instance}' if instance else ''}-reg.sock"


class KubeletPlugin:
    """The two gRPC servers of a DRA driver: one for registration with the kubelet, one for the kubelet's requests."""

    def __init__(
        self,
        driver: str,
        claims: DraDriver,
        health: Callable[[], Sequence[DeviceHealth]],
        registry: Path,
        folder: Path,
        on_message: Callable[[str], None],
        *,
        instance: str = "",
    ):
        """Start both servers. The folders must exist. Raises OSError if another process listens at one of the sockets.

        Args:
            driver: The driver's name, a DNS subdomain.
            claims: Prepares and unprepares the claims that the kubelet names.
            health: Returns the health of all devices.
            registry: The folder in which the kubelet searches for plugins' sockets.
            folder: The folder for the socket of the DRA service.
            on_message: Called with messages for the log.
            instance: The uid of the driver's pod. It is part of the sockets' names, so that two drivers can run during
                a rolling update. The kubelet uses the newer one.
        """
        part = f"-{instance}" if instance else ""
        self.socket = folder / f"dra{part}.sock"
        self.registration_socket = registration_socket(driver, registry, instance)
        self._driver, self._claims, self._health, self._on_message = driver, claims, health, on_message
        self._stopped = threading.Event()
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        # The kubelet expects registration and service at different sockets, so there are two servers.
        self._servers = [
            grpc.server(ThreadPoolExecutor(SERVICE_THREADS + MAX_HEALTH_WATCHES), options=options) for _ in range(2)
        ]
        self._watches = threading.BoundedSemaphore(MAX_HEALTH_WATCHES)
        services = [*map(self._dra_handlers, DRA_VERSIONS), *map(self._health_handlers, HEALTH_VERSIONS)]
        self._servers[0].add_generic_rpc_handlers(tuple(services))
        self._servers[1].add_generic_rpc_handlers((self._registration_handlers(),))
        # Start the DRA service first, because the kubelet calls it as soon as it finds the registration socket.
        for server, path in zip(self._servers, (self.socket, self.registration_socket), strict=True):
            # Remove the file that a killed driver has left. Raises OSError if another process listens there.
            remove_abandoned(str(path))
            # The kubelet runs as root, and with mode 0600 only root may connect.
            mask = os.umask(0o177)
            try:
                server.add_insecure_port(f"unix:{path}")
            finally:
                os.umask(mask)
            server.start()

    def close(self) -> None:
        """Stop both servers. Requests in flight have STOP_LIMIT_S to end."""
        # Unregister first, so that the kubelet sends no further request.
        remove_path(str(self.registration_socket))
        self._stopped.set()
        for stopped in [server.stop(STOP_LIMIT_S) for server in reversed(self._servers)]:
            stopped.wait()
        remove_path(str(self.socket))

    def lost_sockets(self) -> list[Path]:
        """Return the sockets that the kubelet can't reach because their files were removed."""
        return [path for path in (self.socket, self.registration_socket) if file_at(str(path)) is None]

    def _dra_handlers(self, version: str) -> "grpc.GenericRpcHandler[Any, Any]":
        def prepare(request: Any, context: grpc.ServicerContext) -> Message:
            answer = dra_message(version, "NodePrepareResourcesResponse")()
            for ref in _claims_of(request, context):
                # Each claim has a separate result, so one claim's failure does not fail the others.
                claim_answer = answer.claims[ref.uid]
                try:
                    for device in self._claims.prepare(ref):
                        _add_device(claim_answer, device)
                except Exception as error:
                    # Remove a partial list of devices, which would count as a success.
                    claim_answer.Clear()
                    claim_answer.error = self._logged("prepare", ref, error)
            return answer  # type: ignore[no-any-return]

        def unprepare(request: Any, context: grpc.ServicerContext) -> Message:
            answer = dra_message(version, "NodeUnprepareResourcesResponse")()
            for ref in _claims_of(request, context):
                claim_answer = answer.claims[ref.uid]
                try:
                    self._claims.unprepare(ref)
                except Exception as error:
                    claim_answer.error = self._logged("unprepare", ref, error)
            return answer  # type: ignore[no-any-return]

        methods = {
            "NodePrepareResources": _method(prepare, dra_message(version, "NodePrepareResourcesRequest")),
            "NodeUnprepareResources": _method(unprepare, dra_message(version, "NodeUnprepareResourcesRequest")),
        }
        return grpc.method_handlers_generic_handler(f"k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin", methods)

    def _health_handlers(self, version: str) -> "grpc.GenericRpcHandler[Any, Any]":
        def watch(_request: Any, context: grpc.ServicerContext) -> Iterator[Message]:
            if not self._watches.acquire(blocking=False):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {MAX_HEALTH_WATCHES} watches are allowed")
            try:
                yield from self._reports(version, context)
            finally:
                self._watches.release()

        request = message(f"{version}.NodeWatchResourcesRequest")
        methods = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                watch,
                request_deserializer=request.FromString,
                response_serializer=lambda reply: reply.SerializeToString(),
            )
        }
        return grpc.method_handlers_generic_handler(f"{version}.DRAResourceHealth", methods)

    def _reports(self, version: str, context: grpc.ServicerContext) -> Iterator[Message]:
        """Yield the health of all devices whenever it changes, and every HEALTH_S."""
        last: Sequence[DeviceHealth] | None = None
        due_s = 0.0
        while context.is_active() and not self._stopped.is_set():
            health = self._health()
            if health != last or time.monotonic() >= due_s:
                last, due_s = health, time.monotonic() + HEALTH_S
                yield _health_report(version, health)
            self._stopped.wait(HEALTH_POLL_S)

    def _registration_handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        def info(_request: Any, _context: grpc.ServicerContext) -> Message:
            # The kubelet chooses a version of each service.
            versions = [f"{version}.DRAPlugin" for version in DRA_VERSIONS]
            versions += [f"{version}.DRAResourceHealth" for version in HEALTH_VERSIONS]
            return message("pluginregistration.PluginInfo")(  # type: ignore[no-any-return]
                type="DRAPlugin", name=self._driver, endpoint=str(self.socket), supported_versions=versions
            )

        def notify(request: Any, _context: grpc.ServicerContext) -> Message:
            if request.plugin_registered:
                self._on_message("the kubelet has registered the driver")
            else:
                self._on_message(f"the kubelet refuses the driver: {request.error!r}")
            return message("pluginregistration.RegistrationStatusResponse")()  # type: ignore[no-any-return]

        methods = {
            "GetInfo": _method(info, message("pluginregistration.InfoRequest")),
            "NotifyRegistrationStatus": _method(notify, message("pluginregistration.RegistrationStatus")),
        }
        return grpc.method_handlers_generic_handler("pluginregistration.Registration", methods)

    def _logged(self, doing: str, ref: ClaimRef, error: Exception) -> str:
        self._on_message(f"{doing} {ref.uid!r}: {type(error).__name__}: {error}")
        return str(error) or type(error).__name__


def _health_report(version: str, devices: Sequence[DeviceHealth]) -> Message:
    report = message(f"{version}.NodeWatchResourcesResponse")()
    now_s = int(time.time())
    for device in devices:
        status = UNKNOWN if device.is_healthy is None else HEALTHY if device.is_healthy else UNHEALTHY
        report.devices.add(
            device={"pool_name": device.pool, "device_name": device.device},
            health=status,
            last_updated_time=now_s,
            health_check_timeout_seconds=HEALTH_TIMEOUT_S,
            message=device.message,
        )
    return report  # type: ignore[no-any-return]


def _method(handler: Callable[[Any, grpc.ServicerContext], Message], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        handler, request_deserializer=request.FromString, response_serializer=lambda reply: reply.SerializeToString()
    )


def _claims_of(request: Any, context: grpc.ServicerContext) -> list[ClaimRef]:
    if len(request.claims) > MAX_CLAIMS:
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"a request can have at most {MAX_CLAIMS} claims, not {len(request.claims)}",
        )
    return [ClaimRef(claim.namespace, claim.uid, claim.name) for claim in request.claims]


def _add_device(answer: Any, device: PreparedDevice) -> None:
    added = answer.devices.add(
        request_names=[device.request],
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=[device.cdi_id],
    )
    # v1beta1 has no share_id.
    if device.share_id and "share_id" in added.DESCRIPTOR.fields_by_name:
        added.share_id = device.share_id
