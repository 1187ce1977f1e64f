"""Describes the node's cards as devices, and computes the writes of ResourceSlices that publish them. Pure.

A slice's name has the node's name and the slice's number, so a repeated create fails instead of adding a second slice.
The scheduler ignores a pool if its slices have different generations. So the generation is increased if more than one
slice must be written.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

DRIVER: Final = "dra.gpulease.internal"
"""The driver's name. The top-level domain `internal` is reserved for private use."""

API: Final = "resource.k8s.io/v1"
CAPACITY: Final = "vram"

LEAST_VRAM: Final = 1 << 20
"""Minimum bytes that a claim may request of a card. Sizes are multiples of this."""

DEFAULT_VRAM: Final = 1 << 30
"""Default size of a claim's part of a card, in bytes."""

MAX_SLICE_DEVICES: Final = 64
"""Kubernetes' limit on the devices of one ResourceSlice if any of them has a taint; without taints it is 128."""

MAX_NAME_CHARS: Final = 253
"""Kubernetes' limit on the characters of an object's name."""

_MAX_ATTRIBUTE_CHARS: Final = 64
_TAINT_DOMAIN: Final = "gpulease.internal"
_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


class Trouble(Enum):
    """Why a card takes no new claims. The value is the name in the key of a device taint."""

    DRAINED = "drained"
    """The node's daemon is drained: it grants no new leases, and the remaining ones end at a deadline."""
    FENCED = "fenced"
    """All of the card's memory is fenced: none was proved free."""
    FULL = "full"
    """Leases outside Kubernetes or processes outside the daemon hold all of the card's memory."""
    SICK = "sick"
    """The card is degraded, or the daemon can't grant any lease."""
    UNREACHABLE = "unreachable"
    """The daemon does not answer."""

    @property
    def key(self) -> str:
        return f"{_TAINT_DOMAIN}/{self.value}"

    @property
    def is_unhealthy(self) -> bool:
        """Whether the problem also affects the card's existing leases."""
        return self in (Trouble.SICK, Trouble.FENCED)


@dataclass(frozen=True, slots=True)
class PublishedCard:
    """A card with the properties that are published.

    Attributes:
        uuid: Its UUID, from which the device's name is made.
        product: The product's name.
        driver: The daemon's driver for it, `cuda` or `cpu`.
        leasable_bytes: The bytes that all claims together may hold: the free bytes and the bytes that claims hold now.
        troubles: Why it takes no new claims.
    """

    uuid: str
    product: str
    driver: str
    leasable_bytes: int
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class Owner:
    """The Node object that owns the slices. When it is deleted, the cluster deletes the slices, too."""

    name: str
    uid: str


class Verb(Enum):
    DELETE = "delete"
    REPLACE = "replace"
    CREATE = "create"


@dataclass(frozen=True, slots=True)
class ApiWrite:
    """A write to the API server. The slice of a replacement has the resourceVersion that was read."""

    verb: Verb
    slice: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.slice["metadata"]["name"])


def device_name(card_uuid: str) -> str:
    """Return a card's name as a device: its UUID as a DNS label."""
    return re.sub("[^a-z0-9]+", "-", card_uuid.lower()).strip("-")[:63]


def quantity_text(size_bytes: int) -> str:
    """Return bytes as a quantity in the API server's canonical form, such as "80Gi"."""
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power + 1 < len(_SUFFIXES):
        size_bytes, power = size_bytes // 1024, power + 1
    return f"{size_bytes}{_SUFFIXES[power]}"


def device_of(card: PublishedCard) -> dict[str, Any]:
    """Describe a card as a device of a ResourceSlice."""
    troubles = card.troubles
    # Offer a multiple of the step, because the scheduler rounds requests up to one. A capacity below the minimum
    # request is invalid, so a full card offers one step, and a taint excludes new claims.
    usable = card.leasable_bytes // LEAST_VRAM * LEAST_VRAM
    if usable < LEAST_VRAM:
        usable = LEAST_VRAM
        if not troubles:
            troubles = (Trouble.FULL,)
    policy = {
        "default": quantity_text(min(DEFAULT_VRAM, usable)),
        "validRange": {
            "min": quantity_text(LEAST_VRAM),
            "max": quantity_text(usable),
            "step": quantity_text(LEAST_VRAM),
        },
    }
    device: dict[str, Any] = {
        "name": device_name(card.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            "uuid": {"string": card.uuid[:_MAX_ATTRIBUTE_CHARS]},
            "productName": {"string": card.product[:_MAX_ATTRIBUTE_CHARS]},
            "driver": {"string": card.driver[:_MAX_ATTRIBUTE_CHARS]},
        },
        "capacity": {CAPACITY: {"value": quantity_text(usable), "requestPolicy": policy}},
    }
    if troubles:
        device["taints"] = [{"key": trouble.key, "effect": "NoSchedule"} for trouble in troubles]
    return device


def slice_name(node: str, number: int) -> str:
    """Return the name of a node's slice. If the node's name is too long, it is truncated, and its digest is added."""
    end = f"-{DRIVER}-{number}"
    if len(node) + len(end) > MAX_NAME_CHARS:
        digest = hashlib.sha256(node.encode()).hexdigest()[:16]
        node = f"{node[: MAX_NAME_CHARS - len(end) - len(digest) - 1].rstrip('-.')}-{digest}"
    return node + end


def digest_of(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest by which lists of devices are compared, without the times of taints."""
    return hashlib.sha256(json.dumps(list(map(_without_times, devices)), sort_keys=True).encode()).hexdigest()


def writes_to(
    devices: Sequence[Mapping[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    owner: Owner,
    stored_as: Mapping[str, str],
) -> list[ApiWrite]:
    """Return the writes, in order, that turn the stored slices of this node and driver into slices of `devices`.

    Args:
        devices: The devices to publish.
        stored: The slices in the cluster, of this node and this driver.
        owner: The Node.
        stored_as: For the digest of a list that was sent, the digest of the list that the API server stored. A server
            drops fields of features that are off. Without this table, the same write would be repeated forever.
    """
    parts = [list(devices[at : at + MAX_SLICE_DEVICES]) for at in range(0, len(devices), MAX_SLICE_DEVICES)] or [[]]
    desired = {slice_name(owner.name, number): part for number, part in enumerate(parts)}
    by_name = {stored_slice["metadata"]["name"]: stored_slice for stored_slice in stored}
    highest = max((_generation(stored_slice) for stored_slice in stored), default=0)
    # Slices with other names are of an earlier version of the driver, or of a time with more cards.
    obsolete = [stored_slice for name, stored_slice in by_name.items() if name not in desired]
    missing = [name for name in desired if name not in by_name]
    changed = [
        name
        for name, part in desired.items()
        if name in by_name and not _is_current(by_name[name], part, highest, len(parts), owner, stored_as)
    ]
    if not (obsolete or missing or changed):
        return []
    # The replacement of a single slice is atomic, so it needs no new generation.
    is_one = not missing and not obsolete and len(changed) == 1
    generation = max(highest, 1) if is_one else highest + 1
    pool = {"name": owner.name, "generation": generation, "resourceSliceCount": len(parts)}
    writes = [
        ApiWrite(Verb.DELETE, {"metadata": {"name": stored_slice["metadata"]["name"]}}) for stored_slice in obsolete
    ]
    for name, part in desired.items():
        if name in by_name and is_one and name not in changed:
            continue
        body = _slice(name, part, pool, owner)
        if name not in by_name:
            writes.append(ApiWrite(Verb.CREATE, body))
            continue
        # With the version that was read, the write fails if another client has written since.
        body["metadata"]["resourceVersion"] = by_name[name]["metadata"]["resourceVersion"]
        _keep_times(body["spec"]["devices"], by_name[name]["spec"].get("devices") or ())
        writes.append(ApiWrite(Verb.REPLACE, body))
    return writes


def dropped_fields(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> set[str]:
    """Return the names of device fields that the API server dropped because their feature gates are off."""
    stored_devices = {device["name"]: device for device in stored["spec"].get("devices") or ()}
    return {
        name
        for device in sent["spec"]["devices"]
        for name in device
        if name not in stored_devices.get(device["name"], {})
    }


def _slice(name: str, devices: Sequence[Mapping[str, Any]], pool: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
    reference = {"apiVersion": "v1", "kind": "Node", "name": owner.name, "uid": owner.uid, "controller": True}
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": name, "ownerReferences": [reference]},
        "spec": {
            "driver": DRIVER,
            "nodeName": owner.name,
            "pool": dict(pool),
            "devices": [dict(device) for device in devices],
        },
    }


def _is_current(
    stored: Mapping[str, Any],
    part: Sequence[Mapping[str, Any]],
    generation: int,
    count: int,
    owner: Owner,
    stored_as: Mapping[str, str],
) -> bool:
    pool = {"name": owner.name, "generation": generation, "resourceSliceCount": count}
    owners = [reference.get("uid") for reference in stored["metadata"].get("ownerReferences") or ()]
    digest = digest_of(part)
    return (
        generation > 0
        and stored["spec"].get("pool") == pool
        and owners == [owner.uid]
        and digest_of(stored["spec"].get("devices") or ()) in (digest, stored_as.get(digest))
    )


def _generation(stored: Mapping[str, Any]) -> int:
    return int((stored["spec"].get("pool") or {}).get("generation") or 0)


def _without_times(device: Mapping[str, Any]) -> dict[str, Any]:
    # Leave out `timeAdded`, which the API server adds.
    taints = [
        {key: value for key, value in taint.items() if key != "timeAdded"} for taint in device.get("taints") or ()
    ]
    rest = {key: value for key, value in device.items() if key != "taints"}
    return rest | ({"taints": taints} if taints else {})


def _keep_times(devices: Sequence[dict[str, Any]], stored: Sequence[Mapping[str, Any]]) -> None:
    """Copy the times of taints that stay, because tolerations count from them."""
    times = {
        (device["name"], taint["key"], taint["effect"]): taint["timeAdded"]
        for device in stored
        for taint in device.get("taints") or ()
        if "timeAdded" in taint
    }
    for device in devices:
        if "taints" in device:
            device["taints"] = [
                taint
                | ({"timeAdded": times[at]} if (at := (device["name"], taint["key"], taint["effect"])) in times else {})
                for taint in device["taints"]
            ]
