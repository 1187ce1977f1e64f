"""A simulated API server, with the requests that the DRA driver sends.

It implements the features that make reconciliation hard: resourceVersions, conflicts, watches with a bounded history,
deletions by others, fields that are dropped while their feature gate is off, quantities in canonical form, and the
times of taints. It checks bodies against Kubernetes' published types (lightkube-models is generated from its OpenAPI
documents), and each request against the rules of the driver's own ClusterRole.
"""

import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
import yaml
from lightkube.models.meta_v1 import Status
from lightkube.models.resource_v1 import ResourceClaim, ResourceSlice

import gpulease.client.integrations.kubernetes

ACCOUNT_TOKEN = "account-token"
DRIVER = "dra.gpulease.internal"
MANIFESTS: Final = Path(next(iter(gpulease.client.integrations.kubernetes.__path__))) / "manifests"
GROUP: Final = "resource.k8s.io"
LEASES_GATES: Final = frozenset({"DRAConsumableCapacity", "DRADeviceTaints"})
_LABEL: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PATH: Final = re.compile(
    "/(?:api/v1|apis/resource.k8s.io/v1)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    "(?:/(?P<name>[^/]+))?(?:/(?P<sub>status))?"
)


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def cluster_rules() -> list[dict[str, list[str]]]:
    """Return the rules of the driver's ClusterRole, from its manifest."""
    documents = yaml.safe_load_all((MANIFESTS / "driver.yaml").read_text())
    return [rule for found in documents if found["kind"] == "ClusterRole" for rule in found["rules"]]


def check_type(body: object, kind: type) -> None:
    """Raise Refused if a body has a member that Kubernetes' type does not have, or a member of another type."""
    try:
        known = msgspec.to_builtins(msgspec.convert(body, kind))
    except msgspec.ValidationError as error:
        raise Refused(422, f"{kind.__name__}: {error}") from None
    _compare(body, known, kind.__name__)


def _compare(body: object, known: object, at: str) -> None:
    if isinstance(body, Mapping):
        assert isinstance(known, Mapping)
        for name, value in body.items():
            if name not in known:
                # The type's encoder leaves out members that have their default, and also unknown members.
                if value not in (None, [], {}, False, 0, ""):
                    raise Refused(400, f'strict decoding error: unknown field "{at}.{name}"')
                continue
            _compare(value, known[name], f"{at}.{name}")
    elif isinstance(body, list):
        assert isinstance(known, list)
        for number, (one, other) in enumerate(zip(body, known, strict=True)):
            _compare(one, other, f"{at}[{number}]")


def canonical(quantity: str) -> str:
    """Return a quantity as the API server stores it: with the largest suffix for which it is a whole number."""
    found = re.fullmatch(r"(\d+)([KMGTPE]i|[kMGTPE])?", quantity)
    assert found, quantity
    number, suffix = int(found[1]), found[2] or ""
    base, suffixes = (1024, ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]) if suffix.endswith("i") else (1000, [*"kMGTPE"])
    power = suffixes.index(suffix) + 1 if suffix else 0
    while number and number % base == 0 and power < len(suffixes):
        number, power = number // base, power + 1
    return f"{number}{suffixes[power - 1] if power else ''}"


def _bytes(quantity: str) -> Decimal:
    found = re.fullmatch(r"(\d+)([KMGTPE])?(i)?", quantity.replace("k", "K"))
    assert found, quantity
    power = "KMGTPE".index(found[2]) + 1 if found[2] else 0
    return Decimal(found[1]) * Decimal(1024 if found[3] else 1000) ** power


class KubernetesApi:
    """The server.

    Attributes:
        gates: The feature gates that are on.
        asked: The paths of all requests about claims.
        used: Permissions of the ClusterRole that the driver's requests have used: (verb, resource).
        watches: Number of watches that have begun.
        is_down: While it is set, the server closes connections without an answer.
    """

    def __init__(self, *nodes: str) -> None:
        self.gates = set(LEASES_GATES)
        self.asked: list[str] = []
        self.used: set[tuple[str, str]] = set()
        self.writes = 0
        self.watches = 0
        self.is_down = False
        self._rules = cluster_rules()
        self._changed = threading.Condition()
        self._version, self._oldest = 100, 100
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._applied: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        self._is_closed = False
        self._watches_ended = 0
        for node in nodes:
            self.add_node(node)
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                served.serve(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A client that went away in the middle of an answer.

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    # --- for tests ---

    def add_node(self, name: str) -> str:
        """Add a Node. A Node of the same name is replaced, and its slices are deleted. Returns the new uid."""
        made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": str(uuid.uuid4())}}
        with self._changed:
            self._put(("nodes", "", name), made)
            for found in self.slices():
                if found["spec"]["nodeName"] == name:
                    self._remove(("resourceslices", "", found["metadata"]["name"]))
        return str(made["metadata"]["uid"])  # type: ignore[index]

    def add_claim(self, made: dict[str, Any]) -> None:
        with self._changed:
            check_type(made, ResourceClaim)
            self._put(("resourceclaims", made["metadata"]["namespace"], made["metadata"]["name"]), made)

    def delete_claim(self, namespace: str, name: str) -> None:
        with self._changed:
            self._remove(("resourceclaims", namespace, name))

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        return self._objects["resourceclaims", namespace, name]

    def forget_claims(self) -> None:
        with self._changed:
            for key in [key for key in self._objects if key[0] == "resourceclaims"]:
                self._remove(key)
            self.asked.clear()

    def slices(self) -> list[dict[str, Any]]:
        """Return all slices in the order of their names."""
        with self._changed:
            return [found for key, found in sorted(self._objects.items()) if key[0] == "resourceslices"]

    def wipe(self, driver: str = DRIVER) -> int:
        """Delete a driver's slices, as the kubelet does at its start and after a driver's registration has ended."""
        with self._changed:
            names = [found["metadata"]["name"] for found in self.slices() if found["spec"]["driver"] == driver]
            for name in names:
                self._remove(("resourceslices", "", name))
            return len(names)

    def change(self, name: str, **spec: Any) -> None:
        """Change a slice's spec, as a person with kubectl would."""
        with self._changed:
            found = self._objects["resourceslices", "", name]
            self._put(("resourceslices", "", name), found | {"spec": found["spec"] | spec})

    def add_slice(self, made: dict[str, Any]) -> None:
        with self._changed:
            self._put(("resourceslices", "", made["metadata"]["name"]), made)

    def compact(self) -> None:
        """Discard all past events and end all watches, so that no client can continue its watch."""
        with self._changed:
            self._version += 10
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    def end_watches(self) -> None:
        """End all watches cleanly, as a server does when their time is up."""
        with self._changed:
            self._watches_ended += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- requests ---

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        if self.is_down:
            handler.close_connection = True
            return
        try:
            found = _PATH.fullmatch(parts.path)
            if found is None:
                raise Refused(404, "the server could not find the requested resource")
            place = {name: value or "" for name, value in found.groupdict().items()}
            if place["plural"] == "resourceclaims":
                self.asked.append(parts.path)
            if handler.headers["Authorization"] != f"Bearer {ACCOUNT_TOKEN}":
                raise Refused(401, "Unauthorized")
            if query.get("watch") == "true":
                self._allow("watch", place["plural"])
                self._watch(handler, query)
                return
            answer = self._answer(handler.command, place, query, body)
        except Refused as refused:
            answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": refused.code}
            answer |= {"message": str(refused), "metadata": {}}
            check_type(answer, Status)
            self._send(handler, refused.code, answer)
            return
        self._send(handler, 201 if handler.command == "POST" else 200, answer)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, answer: object) -> None:
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        # Close the connection after each request. A kept connection would look like a leak in the test that opened it.
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(data)

    def _allow(self, verb: str, resource: str, name: str = "") -> None:
        for rule in self._rules:
            names = rule.get("resourceNames")
            if verb in rule["verbs"] and resource in rule["resources"] and (names is None or name in names):
                self.used.add((verb, resource))
                return
        raise Refused(403, f'{resource} is forbidden: User "gpulease-dra" cannot {verb} resource "{resource}"')

    def _answer(self, command: str, place: dict[str, str], query: dict[str, str], body: Any) -> Any:
        plural, name = place["plural"], place["name"]
        key = plural, place["namespace"], name
        with self._changed:
            if place["sub"]:
                self._allow(command.lower(), f"{plural}/{place['sub']}")
                self._allow(f"associated-node:{command.lower()}", f"{plural}/driver", DRIVER)
                return self._apply(key, body)
            verb = {"GET": "get" if name else "list", "POST": "create", "PUT": "update"}.get(command, command.lower())
            self._allow(verb, plural)
            if verb == "list":
                items = [found for found in self.slices() if _selected(found, query)]
                return {
                    "kind": "ResourceSliceList",
                    "apiVersion": f"{GROUP}/v1",
                    "metadata": {"resourceVersion": str(self._version)},
                    "items": items,
                }
            if verb == "create":
                assert plural == "resourceslices"
                key = plural, "", body["metadata"]["name"]
                if key in self._objects:
                    raise Refused(409, f'{plural} "{key[2]}" already exists')
                self.writes += 1
                made = self._put(key, self._admitted(body, None))
                # The garbage collector deletes the objects that belong to a deleted object.
                nodes = [found["metadata"]["uid"] for at, found in self._objects.items() if at[0] == "nodes"]
                if any(owner["uid"] not in nodes for owner in made["metadata"].get("ownerReferences", [])):
                    self._remove(key)
                return made
            if key not in self._objects:
                raise Refused(404, f'{plural} "{name}" not found')
            if verb == "update":
                stored = self._objects[key]
                if body["metadata"].get("resourceVersion") != stored["metadata"]["resourceVersion"]:
                    raise Refused(
                        409, f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified'
                    )
                self.writes += 1
                return self._put(key, self._admitted(body, stored))
            if verb == "delete":
                self.writes += 1
                self._remove(key)
                return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            return self._objects[key]

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        # Announce that the connection closes; otherwise a client could send its next request on it first.
        handler.send_header("Connection", "close")
        handler.end_headers()
        with self._changed:
            self.watches += 1
            ended = self._watches_ended
        for event in self._events_after(int(query["resourceVersion"]), query, ended):
            line = json.dumps(event).encode() + b"\n"
            handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    def _events_after(self, version: int, query: dict[str, str], ended: int) -> Iterator[dict[str, Any]]:
        # A watch without a time limit would not notice that its connection died. This server ignores the limit, and
        # only `end_watches` ends a watch. Otherwise a driver that outlives a test would begin its next watch, with a
        # thread and a descriptor, during another test.
        assert 0 < int(query["timeoutSeconds"]) <= 3600
        while True:
            with self._changed:
                if version < self._oldest:
                    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
                    status |= {"code": 410, "reason": "Expired", "message": f"too old resource version: {version}"}
                    yield {"type": "ERROR", "object": status}
                    return
                after = [event for event in self._events if event[0] > version]
                if not after:
                    if self._is_closed or self.is_down or ended != self._watches_ended:
                        return
                    self._changed.wait(0.05)
                    continue
            for number, kind, found in after:
                version = number
                if _selected(found, query):
                    yield {"type": kind, "object": found}

    # --- objects ---

    def _put(self, key: tuple[str, str, str], made: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        old = self._objects.get(key)
        metadata = made["metadata"] | {"resourceVersion": str(self._version)}
        if "uid" not in metadata:
            metadata["uid"] = str(uuid.uuid4()) if old is None else old["metadata"]["uid"]
        # Store a copy, so that it does not change if a test or a client changes its own object.
        made = json.loads(json.dumps(made | {"metadata": metadata}))
        self._objects[key] = made
        self._tell(key, "ADDED" if old is None else "MODIFIED", made)
        return made

    def _remove(self, key: tuple[str, str, str]) -> None:
        self._version += 1
        made = self._objects.pop(key)
        gone = made | {"metadata": made["metadata"] | {"resourceVersion": str(self._version)}}
        self._tell(key, "DELETED", gone)

    def _tell(self, key: tuple[str, str, str], kind: str, made: dict[str, Any]) -> None:
        if key[0] == "resourceslices":
            self._events.append((self._version, kind, made))
        self._changed.notify_all()

    def _admitted(self, body: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
        """Return a slice as the server stores it. Raises Refused with the code 422 if it is invalid."""
        check_type(body, ResourceSlice)
        made: dict[str, Any] = json.loads(json.dumps(body))
        spec = made["spec"]
        most = 64 if any(device.get("taints") for device in spec["devices"]) else 128
        _require(len(spec["devices"]) <= most, f"must have at most {most} items")
        _require(spec["pool"]["generation"] >= 0 and spec["pool"]["resourceSliceCount"] > 0, "pool")
        if old is not None:
            for name in ("driver", "nodeName"):
                _require(old["spec"][name] == spec[name], f"spec.{name}: field is immutable")
            _require(old["spec"]["pool"]["name"] == spec["pool"]["name"], "spec.pool.name: field is immutable")
        names = [device["name"] for device in spec["devices"]]
        _require(len(set(names)) == len(names), "devices must have different names")
        before = {} if old is None else {device["name"]: device for device in old["spec"]["devices"]}
        for device in spec["devices"]:
            self._admit_device(device, before.get(device["name"], {}))
        return made

    def _admit_device(self, device: dict[str, Any], before: dict[str, Any]) -> None:
        _require(bool(_LABEL.fullmatch(device["name"])), f"{device['name']}: must be a DNS label")
        _require(len(device.get("attributes", {})) + len(device.get("capacity", {})) <= 32, "too many attributes")
        for value in device.get("attributes", {}).values():
            _require(len(value) == 1 and len(str(*value.values())) <= 64, "an attribute has one value of 64 characters")
        for capacity in device["capacity"].values():
            policy = capacity.get("requestPolicy")
            if policy is not None:
                _require(bool(device.get("allowMultipleAllocations")), "requestPolicy needs allowMultipleAllocations")
                valid = policy["validRange"]
                least, largest, step = (_bytes(valid[name]) for name in ("min", "max", "step"))
                value = _bytes(capacity["value"])
                _require(least <= _bytes(policy["default"]) <= largest <= value, "the policy's range is invalid")
                _require((largest - least) % step == (_bytes(policy["default"]) - least) % step == 0, "step")
                for place in (policy, valid):
                    for name, text in place.items():
                        place[name] = canonical(text) if isinstance(text, str) else text
            capacity["value"] = canonical(capacity["value"])
        if "DRAConsumableCapacity" not in self.gates:
            device.pop("allowMultipleAllocations", None)
            for capacity in device["capacity"].values():
                capacity.pop("requestPolicy", None)
        if "DRADeviceTaints" not in self.gates:
            device.pop("taints", None)
        for taint in device.get("taints", []):
            _require(taint["effect"] in ("NoSchedule", "NoExecute"), "a taint's effect")
            same = [one for one in before.get("taints", []) if one["key"] == taint["key"]]
            if "timeAdded" in taint:
                _require(not same or same[0]["timeAdded"] == taint["timeAdded"], "made-up timeAdded")
            else:
                taint["timeAdded"] = f"2026-11-28T12:00:00.{self._version:06}Z"

    def _apply(self, key: tuple[str, str, str], body: dict[str, Any]) -> dict[str, Any]:
        """Do a server-side apply of a claim's status.devices by one field manager."""
        check_type(body, ResourceClaim)
        stored = self._objects.get(key)
        if stored is None:
            raise Refused(404, f'resourceclaims "{key[2]}" not found')
        if body["metadata"].get("uid", stored["metadata"]["uid"]) != stored["metadata"]["uid"]:
            raise Refused(409, "Precondition failed: UID in precondition")
        allocated = {_device_key(one) for one in stored["status"]["allocation"]["devices"]["results"]}
        entries = body["status"]["devices"]
        for one in entries:
            _require(_device_key(one) in allocated, "must be an allocated device in the claim")
            _require(len(json.dumps(one.get("data", {}))) <= 10 << 10, "data has at most 10 KiB")
            for condition in one.get("conditions", []):
                needed = {"type", "status", "reason", "message", "lastTransitionTime"}
                _require(needed <= condition.keys(), "conditions")
        mine = self._applied.get(key[1:], [])
        others = [one for one in stored["status"].get("devices", []) if _device_key(one) not in mine]
        self._applied[key[1:]] = [_device_key(one) for one in entries]
        return self._put(key, stored | {"status": stored["status"] | {"devices": [*others, *entries]}})


def _device_key(one: Mapping[str, Any]) -> tuple[str, ...]:
    return one["driver"], one["pool"], one["device"], one.get("shareID", "")


def _selected(found: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    pairs = [pair.split("=") for pair in query.get("fieldSelector", "").split(",") if pair]
    return all(found["spec"].get(name.removeprefix("spec.")) == value for name, value in pairs)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(422, f"ResourceSlice is invalid: {what}")
