"""Acquires a claim's leases when it is prepared, renews them, and frees them when it is unprepared.

Each lease is at first short, and is recorded on the disk before the next one is acquired. When all are acquired, they
are extended and the record is marked as ready. So if the driver is killed in between, at most one lease is not
recorded, and it expires within FIRST_LEASE_S. A daemon that supports request ids returns that lease to the next
attempt.

If a claim is deleted while its node is cut off, its leases are no longer renewed and expire.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from gpulease.client.console.reports import cards_of
from gpulease.client.core.lease_request import milliseconds
from gpulease.client.errors import Disconnected, GpuLeaseError, InvalidRequest
from gpulease.client.integrations.kubernetes.cluster_refusals import ClusterRefused
from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef, PreparedDevice
from gpulease.client.integrations.kubernetes.kubernetes_objects import (
    ClaimRequest,
    DeviceRequest,
    UnusableClaim,
    check_ref,
    parse_claim,
)
from gpulease.client.integrations.kubernetes.node_files import (
    LeasedDevice,
    NodeFiles,
    PreparedClaim,
    boot_id,
    cdi_id,
)
from gpulease.client.integrations.kubernetes.resource_pool import DRIVER, device_name
from gpulease.client.integrations.kubernetes.user_process import UserProcess
from gpulease.client.integrations.proved_end import REVOKED, free_and_prove, report_of
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import lease_id_of
from gpulease.protocol.messages import Empty, LeaseRenew

RENEW_S: Final = 60.0
"""Seconds between two renewals of a claim's leases."""

FIRST_LEASE_S: Final = 30.0
"""Duration in seconds of a lease that is not recorded yet. If the driver is killed, such a lease soon expires."""

PROOF_LIMIT_S: Final = 30.0
"""Maximum seconds to wait until a claim's memory is proved free. The kubelet waits 45 s for the request, and then
retries."""

LEAST_PROOF_S: Final = 1.0
"""Minimum seconds to wait for each lease of a claim, even if earlier leases took all of PROOF_LIMIT_S."""

_USERS_LOCK: Final = "users"


class LeaseRevokedByOperator(GpuLeaseError):
    """An operator revoked a lease of a prepared claim. The claim is not prepared again."""

    default_hint = "Delete the pod. The audit log says who revoked it, and why"


class ClaimApi(Protocol):
    """The methods of KubernetesCluster that this module uses."""

    def claim(self, namespace: str, name: str) -> object: ...
    def report_devices(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None: ...


class ClaimLeases:
    """Prepares and unprepares claims on one node. Thread-safe: requests for one claim are serialised."""

    def __init__(
        self,
        address: str,
        node: str,
        files: NodeFiles,
        cluster: ClaimApi,
        on_message: Callable[[str], None],
        *,
        lease_s: float,
        shares_users: bool = False,
    ) -> None:
        """Raises InvalidRequest for a daemon on another host, because pods need its socket.

        Args:
            address: The daemon's address, `unix:PATH`.
            node: The node's name in the cluster.
            files: The records, and the files for containers.
            cluster: Reads claims, and writes reports about their devices.
            on_message: Called with messages for the log.
            lease_s: Duration in seconds of a lease, which is renewed.
            shares_users: Whether claims of several namespaces may have the same user on this node.
        """
        if not address.startswith("unix:/"):
            raise InvalidRequest(
                f"the daemon's address must be a Unix socket, which pods can reach, not {address}", "Use unix:/PATH"
            )
        self._address, self._socket = address, Path(address.removeprefix("unix:"))
        self._node, self._files, self._cluster = node, files, cluster
        self._lease_s, self._on_message, self._shares_users = lease_s, on_message, shares_users
        # The last report about each claim's devices. An equal report is not written again.
        self._reported: dict[str, list[dict[str, Any]]] = {}
        # Whether the API server has answered every request of this round. After a failure, the round makes no more
        # requests to it.
        self._api_answers = True
        # Set when a claim was prepared and its devices are not reported yet.
        self.has_news = threading.Event()

    # --- the kubelet's requests ---

    def prepare(self, ref: ClaimRef) -> list[PreparedDevice]:
        """Acquire a claim's leases, or return the leases that it has. Raises GpuLeaseError."""
        check_ref(ref)
        with self._files.locked(ref.uid):
            record = self._files.record(ref.uid)
            # Case 1: the record is of a killed driver or an earlier boot, or leases have expired. Free the remaining
            # leases, then prepare the claim again.
            if record is not None and not self._is_whole(record):
                self._end(record)
                record = None
            # Case 2: the claim is not prepared. In case 3 it is prepared, and the kubelet has repeated its request. In
            # both, write the pod's files and return the devices.
            if record is None:
                record = self._acquire(ref)
            else:
                self._files.write_container_files(record, self._socket)
            # The kubelet expects the request's name without the alternative that the scheduler chose.
            return [
                PreparedDevice(
                    device.main_request, device.pool, device.device, cdi_id(record.uid, number), device.share_id
                )
                for number, device in enumerate(record.devices)
            ]

    def unprepare(self, ref: ClaimRef) -> None:
        """End a claim's leases, and wait until their memory is proved free. After NotProvedFree, the record stays."""
        check_ref(ref)
        with self._files.locked(ref.uid):
            record = self._files.record(ref.uid)
            if record is not None:
                self._end(record)

    def lease_ids(self) -> set[str]:
        """Return the ids of claims' leases, as in reports. Skips records that can't be read."""
        return {device.lease_id for record in self._files.readable_records() for device in record.leases}

    # --- while claims are prepared ---

    def restore(self) -> None:
        """Write the files for containers of prepared claims again, because the folder of CDI files may be in memory."""
        for uid in self._files.uids():
            try:
                record = self._files.record(uid)
                if record is not None and record.is_ready and record.boot_id == boot_id():
                    self._files.write_container_files(record, self._socket)
            except (GpuLeaseError, OSError) as error:
                self._on_message(f"claim {uid}: can't be restored: {error}")

    def keep(self) -> None:
        """Renew the leases of prepared claims, and report their states.

        A failure for one claim is logged, and the next call tries again. A claim that is being prepared or unprepared
        is skipped, so that it does not delay the others.
        """
        self.has_news.clear()
        uids, self._api_answers = self._files.uids(), True
        for uid in uids:
            with self._files.locked(uid, waits=False) as is_ours:
                if not is_ours:
                    continue
                try:
                    record = self._files.record(uid)
                    if record is not None and record.is_ready:
                        self._keep(record)
                except (GpuLeaseError, OSError) as error:
                    self._on_message(f"claim {uid}: {error}")
        self._reported = {uid: report for uid, report in self._reported.items() if uid in uids}

    def _keep(self, record: PreparedClaim) -> None:
        # A claim that was deleted, and perhaps created again, has no pod on this node. Do not renew its leases.
        if self._is_deleted(record):
            self._on_message(f"claim {record.uid} was deleted: its leases are not renewed")
            return
        conditions = [self._renew(device) for device in record.leases]
        devices = [_report(device, *observed) for device, observed in zip(record.leases, conditions, strict=True)]
        if self._api_answers and devices and devices != self._reported.get(record.uid):
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            timed = [
                device | {"conditions": [condition | {"lastTransitionTime": now} for condition in device["conditions"]]}
                for device in devices
            ]
            self._cluster.report_devices(record.namespace, record.name, record.uid, timed)
            self._reported[record.uid] = devices

    def _is_deleted(self, record: PreparedClaim) -> bool:
        if not self._api_answers:
            return False
        try:
            claim: Any = self._cluster.claim(record.namespace, record.name)
        except ClusterRefused as refused:
            self._api_answers = refused.code != 0
            return refused.code == 404
        return bool(claim.get("metadata", {}).get("uid") != record.uid)

    def _renew(self, device: LeasedDevice) -> tuple[bool, str]:
        """Renew a lease. Returns whether it is active and, if not, why."""
        left_s = self._lease_s if device.until_s is None else device.until_s - _boottime_s()
        if left_s > 0:
            ttl_ms = milliseconds(min(left_s, self._lease_s), "the lease", least_ms=1)
            try:
                ask(Opcode.LEASE_RENEW, LeaseRenew(lease_id_of(device.lease_id), ttl_ms), self._address)
            except Disconnected:
                raise
            except GpuLeaseError as error:
                # The lease may have ended, which its report will show.
                self._on_message(f"lease {device.lease_id} is not renewed: {error}")
        report = self._report_of(device)
        return report["state"] == "active", str(report.get("cause") or report["state"])

    # --- leases ---

    def _acquire(self, ref: ClaimRef) -> PreparedClaim:
        # Check the claim, its cards and its users before the first lease.
        requested = parse_claim(self._cluster.claim(ref.namespace, ref.name), ref, DRIVER, self._node)
        # The scheduler uses device names for cards, and the daemon UUIDs.
        cards = {
            device_name(card["uuid"]): card for card in cards_of(ask(Opcode.GET_INVENTORY, Empty(), self._address))
        }
        if missing := [device.device for device in requested.devices if device.device not in cards]:
            raise UnusableClaim(
                f"this node has no card {missing[0][:64]!r}", "The card was removed after the scheduler chose it"
            )
        record = self._reserve_users(ref, requested)
        try:
            # Step 1: acquire a short lease for each device, and record it on the disk before the next.
            for user in record.users:
                numbered = [(number, device) for number, device in enumerate(requested.devices) if device.user == user]
                for extended in self._acquired(record, user, numbered, cards):
                    record = extended
                    self._files.save(record)
            # Sort the devices in the claim's order, by which CDI devices are numbered.
            order = {(device.main_request, device.number): place for place, device in enumerate(requested.devices)}
            devices = sorted(record.devices, key=lambda device: order[device.main_request, device.number])
            record = replace(record, devices=tuple(devices))
            # Step 2: extend the leases to their full duration.
            for device in record.leases:
                ttl_s = self._lease_s if device.until_s is None else device.until_s - _boottime_s()
                ttl_ms = milliseconds(max(min(ttl_s, self._lease_s), FIRST_LEASE_S), "the lease", least_ms=1)
                ask(Opcode.LEASE_RENEW, LeaseRenew(lease_id_of(device.lease_id), ttl_ms), self._address)
            self._files.write_container_files(record, self._socket)
            # Step 3: mark the record as ready, before the kubelet gets a reply and starts the pod.
            record = replace(record, is_ready=True)
            self._files.save(record)
            self.has_news.set()
            return record
        except BaseException:
            # Leases that can't be ended now stay in the record until the kubelet's next request.
            self._end(record)
            raise

    def _reserve_users(self, ref: ClaimRef, requested: ClaimRequest) -> PreparedClaim:
        """Record a claim without leases. Raises UnusableClaim if one of its users belongs to another namespace.

        The user is the leases' tenant, so containers of the same user can use each other's leases.
        """
        users = tuple(dict.fromkeys(device.user for device in requested.devices))
        with self._files.locked(_USERS_LOCK):
            for other in self._files.readable_records():
                common_users = [user for user in users if user in other.users and user]
                if common_users and other.namespace not in (ref.namespace, "") and not self._shares_users:
                    raise UnusableClaim(
                        f"user {common_users[0]} is used by claims of another namespace on this node",
                        "Use different users in each namespace, or start the driver with --share-users "
                        "if namespaces may use each other's leases",
                    )
            record = PreparedClaim(ref.uid, boot_id(), ref.namespace, ref.name, requested.claim, users)
            # A record without leases need not survive a crash of the host.
            self._files.save(record, is_synced=False)
            return record

    def _acquired(
        self, record: PreparedClaim, user: int, devices: list[tuple[int, DeviceRequest]], cards: dict[str, Any]
    ) -> Iterator[PreparedClaim]:
        """Acquire the leases of one user. Yields the extended record after each lease."""
        first_ms = milliseconds(FIRST_LEASE_S, "the first time", least_ms=1)
        with ExitStack() as stack:
            process: UserProcess | None = None
            for number, device in devices:
                lease_id, size_bytes = "", 0
                if not device.is_admin:
                    process = process or stack.enter_context(UserProcess(user, self._address, self._socket))
                    # Without a size, the claim has the whole card.
                    card = cards[device.device]
                    size_bytes = card["capacity_bytes"] if device.size_bytes is None else device.size_bytes
                    request = request_id(record.uid, number)
                    lease_id = str(process.acquire(size_bytes, first_ms, card["uuid"], request))
                record = record.with_device(_leased_device(device, lease_id, size_bytes))
                yield record

    def _report_of(self, device: LeasedDevice) -> dict[str, Any]:
        return report_of(lease_id_of(device.lease_id), self._address)

    def _is_whole(self, record: PreparedClaim) -> bool:
        """Return whether all leases of a claim are active, so that it need not be prepared again.

        If not, no container uses the leases that have ended, because the kubelet prepares a claim before it creates the
        pod's sandbox.

        Raises LeaseRevokedByOperator.
        """
        # The claim was not fully prepared, or the host has been restarted.
        if not record.is_ready or record.boot_id != boot_id():
            return False
        reports = list(map(self._report_of, record.leases))
        # An expired lease is replaced. A revoked one is not, because an operator has decided so.
        for device, report in zip(record.leases, reports, strict=True):
            if report["cause"] == REVOKED:
                raise LeaseRevokedByOperator(f"an operator revoked the lease {device.lease_id} of this claim")
        return all(report["state"] == "active" for report in reports)

    def _end(self, record: PreparedClaim) -> None:
        """Free a record's leases, wait until their memory is proved free, and delete the record.

        Raises NotProvedFree.
        """
        until_s = time.monotonic() + PROOF_LIMIT_S
        for device in record.leases:
            # The leases share one limit, so that the kubelet gets a reply in time.
            left_s = max(until_s - time.monotonic(), LEAST_PROOF_S)
            free_and_prove(lease_id_of(device.lease_id), self._address, left_s, self._on_message)
        self._files.forget(record.uid)


def request_id(uid: str, number: int) -> bytes:
    """Return the request id, 16 bytes, by which a daemon recognises a repeated request for this lease of a claim."""
    return hashlib.sha256(f"gpulease dra 1 {uid} {number}".encode()).digest()[:16]


def _leased_device(request: DeviceRequest, lease_id: str, size_bytes: int) -> LeasedDevice:
    until_s = None if request.lease_s is None else _boottime_s() + request.lease_s
    key = request.request, request.number, request.pool, request.device, request.share_id
    return LeasedDevice(*key, request.user, lease_id, size_bytes, until_s)


def _report(device: LeasedDevice, is_active: bool, state: str) -> dict[str, Any]:
    """Return a device's entry in its claim's status.devices, without the time."""
    condition = {
        "type": "Ready",
        "status": "True" if is_active else "False",
        "reason": "LeaseActive" if is_active else "LeaseEnded",
        "message": f"lease {device.lease_id}: {'active' if is_active else state}",
    }
    data = {
        "apiVersion": "gpulease.internal/v1",
        "kind": "LeaseStatus",
        "leaseId": device.lease_id,
        "request": device.request,
        "sizeBytes": device.size_bytes,
    }
    place = {"driver": DRIVER, "pool": device.pool, "device": device.device}
    return place | ({"shareID": device.share_id} if device.share_id else {}) | {"conditions": [condition], "data": data}


def _boottime_s() -> float:
    # This clock continues while the host sleeps, and restarts only with a new boot id.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
