"""Parses and checks the devices that the scheduler allocated to a ResourceClaim on this node.

A card has consumable capacity (KEP-5075): the scheduler assigns parts of the card's `vram` to several claims. Each part
becomes a lease, so the daemon checks again that no byte is assigned twice.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef
from gpulease.client.integrations.kubernetes.resource_pool import CAPACITY, DRIVER

PARAMETERS_API: Final = "gpulease.internal/v1"
PARAMETERS_KIND: Final = "LeaseParameters"

POD_CLAIM_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was made from a template, with the claim's name in the pod."""

MAX_DEVICES: Final = 32
"""Kubernetes' limit on the devices of one claim. Each device becomes a process."""

MAX_USER: Final = 2**32 - 2
"""Largest user id. The next number means "do not change" in setresuid(2)."""

_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LABEL: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAMESPACE: Final = re.compile(_LABEL)
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_QUANTITY: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?|\.\d{1,20})(?:([KMGTPE]i|[mkMGTPE])|[eE]([+-]?\d{1,2}))?")
_SCALE: Final = {
    "m": Decimal("0.001"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


class UnusableClaim(GpuLeaseError):
    """A claim can't be prepared until its author changes it, or an operator changes the driver's settings."""

    default_hint = "Compare the claim with client/integrations/kubernetes/README.md"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A part of one card that the scheduler assigned to a claim.

    Attributes:
        request: The request's name; `REQUEST/SUBREQUEST` if the scheduler chose among alternatives (`firstAvailable`).
        number: The device's number among the devices of the request, from 0.
        pool: The pool's name.
        device: The device's name.
        size_bytes: The part's size; None for the whole card.
        share_id: Kubernetes' id of this share of the device; may be "".
        user: The user that the containers run as.
        lease_s: Maximum seconds of the lease; None if it lasts as long as the claim is prepared.
        is_admin: Whether it is an administrator's access, which has no lease.
    """

    request: str
    number: int
    pool: str
    device: str
    size_bytes: int | None
    share_id: str
    user: int
    lease_s: float | None
    is_admin: bool = False

    @property
    def main_request(self) -> str:
        """The request's name in the pod, which is without the chosen alternative."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim's devices on this node, and the claim's name in its pod."""

    devices: tuple[DeviceRequest, ...]
    claim: str


def check_ref(ref: ClaimRef) -> None:
    """Raise UnusableClaim unless namespace, name and uid have Kubernetes' form. They become parts of paths."""
    for label, text, form in (
        ("uid", ref.uid, _UID),
        ("namespace", ref.namespace, _NAMESPACE),
        ("name", ref.name, _NAME),
    ):
        if len(text) > 253 or not form.fullmatch(text):
            raise UnusableClaim(
                f"{text[:64]!r} is not a claim's {label}", "Only the kubelet, with names from Kubernetes, may call this"
            )


def parse_quantity(text: object) -> int:
    """Convert a Kubernetes quantity, such as "4Gi", to whole bytes, rounded up. Raises UnusableClaim."""
    match = _QUANTITY.fullmatch(str(text)) if isinstance(text, str | int) and not isinstance(text, bool) else None
    if not match:
        raise UnusableClaim(f"{str(text)[:64]!r} must be a quantity of bytes")
    # Use Decimal, because a float would round large sizes.
    number, suffix, exponent = match.groups()
    scale = _SCALE[suffix] if suffix else Decimal(10) ** int(exponent or 0)
    size = math.ceil(Decimal(number) * scale)
    if not 0 < size < 2**63:
        raise UnusableClaim(f"{text} is not a size that a lease can have")
    return size


def parse_claim(claim: object, ref: ClaimRef, driver: str, pool: str) -> ClaimRequest:
    """Parse the devices of this node that were allocated to a ResourceClaim. Raises UnusableClaim.

    Args:
        claim: The object that the API server returned.
        ref: The claim that the kubelet named.
        driver: This driver's name; devices of other drivers are ignored.
        pool: This node's pool.
    """
    # A claim that was deleted and created again has the same name, but another uid.
    uid = _at(claim, "metadata", "uid")
    if uid != ref.uid:
        raise UnusableClaim(
            f"the claim {ref.namespace}/{ref.name} has the uid {str(uid)[:64]}, not {ref.uid}",
            "It was deleted and created again: delete the pod as well",
        )
    # The scheduler's result is in the status. The spec has the author's request.
    allocated = _at(claim, "status", "allocation", "devices")
    # A claim may also have devices of other drivers.
    results = [entry for entry in _list(allocated, "results") if _at(entry, "driver") == driver]
    if not 0 < len(results) <= MAX_DEVICES:
        raise UnusableClaim(
            f"a claim must have 1 to {MAX_DEVICES} devices of {driver} to be prepared, not {len(results)}"
        )
    # A pool has the cards of one node, so a claim with another pool was allocated on another node.
    if other_pools := {str(_at(entry, "pool"))[:64] for entry in results} - {pool}:
        raise UnusableClaim(f"the claim's devices belong to {', '.join(sorted(other_pools))}, but this node is {pool}")
    # The class's parameters come before the claim's, so that the claim's override them.
    configs = [
        ([str(name) for name in _list(config, "requests")], _parameters(_at(config, "opaque", "parameters")))
        for config in _list(allocated, "config")
        if _at(config, "opaque", "driver") == driver
    ]
    devices: list[DeviceRequest] = []
    for result in results:
        devices.append(_device(result, configs, devices))
    # A claim that was made from a template has a generated name; its annotation has its name in the pod.
    pod_claim = _at(claim, "metadata", "annotations", POD_CLAIM_ANNOTATION)
    return ClaimRequest(
        tuple(devices), pod_claim if isinstance(pod_claim, str) and _NAME.fullmatch(pod_claim) else ref.name
    )


def _device(
    result: object, configs: Sequence[tuple[Sequence[str], Mapping[str, Any]]], before: Sequence[DeviceRequest]
) -> DeviceRequest:
    texts = [_at(result, name) for name in ("request", "pool", "device")]
    if not all(isinstance(text, str) and text for text in texts):
        raise UnusableClaim("a device of the claim has no request, pool or name")
    request, pool, device = map(str, texts)
    # A configuration without requests applies to all requests. A configuration for a request also applies to its
    # alternatives.
    chosen: dict[str, Any] = {}
    for requests, parameters in configs:
        if not requests or request in requests or request.partition("/")[0] in requests:
            chosen |= parameters
    is_admin = _at(result, "adminAccess") is True
    user, lease_s = _checked(chosen, request, is_admin=is_admin)
    size = _at(result, "consumedCapacity", CAPACITY) or _at(result, "consumedCapacity", f"{DRIVER}/{CAPACITY}")
    share_id = str(_at(result, "shareID") or "")
    number = sum(request.partition("/")[0] == other.main_request for other in before)
    size_bytes = None if size is None else parse_quantity(size)
    return DeviceRequest(request, number, pool, device, size_bytes, share_id, user, lease_s, is_admin)


def _parameters(parameters: object) -> dict[str, Any]:
    if _at(parameters, "apiVersion") != PARAMETERS_API or _at(parameters, "kind") != PARAMETERS_KIND:
        raise UnusableClaim(f"the claim's parameters must be {PARAMETERS_API} {PARAMETERS_KIND}")
    assert isinstance(parameters, dict)
    values = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    # An unknown key is an error, because a misspelt key would have no effect.
    if unknown := values.keys() - {"user", "leaseSeconds"}:
        raise UnusableClaim(
            f"the claim's parameters contain unknown keys: {', '.join(sorted(map(repr, unknown)))[:200]}"
        )
    return values


def _checked(parameters: Mapping[str, Any], request: str, *, is_admin: bool) -> tuple[int, float | None]:
    user, lease_s = parameters.get("user"), parameters.get("leaseSeconds")
    # To the daemon, root is an operator. So only an administrator's claim may use root. The cluster admits such claims
    # only in namespaces that an administrator has labelled.
    least = 0 if is_admin else 1
    if not isinstance(user, int) or isinstance(user, bool) or not least <= user <= MAX_USER:
        raise UnusableClaim(
            f"the claim's parameters must name the user that the containers of request {request[:64]!r} "
            f"run as, not {user!r}",
            "Write `user: 1000`, and the same number in runAsUser of the pod. It can't be root, because "
            "pods that run as root can't be distinguished",
        )
    if lease_s is not None and (not isinstance(lease_s, int) or isinstance(lease_s, bool) or lease_s < 1):
        raise UnusableClaim(f"leaseSeconds must be a number of seconds, not {lease_s!r}")
    return user, lease_s


def _at(value: object, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _list(parent: object, name: str) -> list[Any]:
    listed = _at(parent, name)
    return listed if isinstance(listed, list) else []
