"""Leases of claims: to prepare is to acquire, to unprepare is to free and wait for the proof.

A claim is prepared in steps: acquire a short lease for each device, and record each before the next; extend the leases
to their full time; write tokens and the CDI specification; mark the record as ready. A driver that is killed in between
leaves leases that are in the record, and at most one that is not, which ends by itself within FIRST_LEASE_S. A daemon
that supports request ids returns that one to the next attempt.
"""

import base64
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from gpulease.client.core.lease_request import milliseconds
from gpulease.client.core.tokens import issue_request
from gpulease.client.errors import Disconnected, GpuLeaseError, InvalidRequest
from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef, PreparedDevice
from gpulease.client.integrations.kubernetes.kubernetes_objects import (
    DeviceWant,
    UnusableClaim,
    WantedDevices,
    check_ref,
    parse_claim,
)
from gpulease.client.integrations.kubernetes.node_files import (
    HeldLease,
    NodeFiles,
    PreparedClaim,
    RecordUnreadable,
    boot_id,
    cdi_id,
)
from gpulease.client.integrations.kubernetes.resource_pool import DRIVER, device_name
from gpulease.client.integrations.proved_end import REVOKED, free_and_prove, report_of
from gpulease.client.sync.driver import ask
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.lease_options import EXCLUSIVITY, ORPHAN, REQUEST_ID
from gpulease.protocol.messages import Empty, LeaseAlloc, LeaseRenew
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE

FIRST_LEASE_S: Final = 30.0
"""Life of a lease until its record is on the disk. If the driver is killed before that, the lease ends by itself."""

TOKEN_S: Final = 300.0
"""Seconds of a pod's token, the longest that a node issues."""

TOKEN_REFRESH_S: Final = 20.0
"""Seconds between new tokens. Each opens one connection, so a restarted container waits for the next token."""

PROOF_LIMIT_S: Final = 30.0
"""Seconds to wait until memory is proved free. The kubelet's limit for the whole request is 45 s, then it retries."""

LEAST_PROOF_S: Final = 1.0
"""Least seconds to wait for each lease of a claim, even if earlier leases used up PROOF_LIMIT_S."""

AUDIENCE_LIMIT_S: Final = 15.0
"""Seconds for the process that requests a user's audience from the node."""

_POD_PERMISSIONS: Final = (
    Permission.LEASE_QUERY | Permission.TASKLET_SUBMIT | Permission.MEM_READ | Permission.MEM_WRITE
)
"""A pod may use its lease. Only the driver may renew, free or revoke it."""

_PARAMETERS: Final = (
    EXCLUSIVITY.parameter(Exclusivity.SHARED),  # containers and pods may share a claim
    ORPHAN.parameter(0),  # the lease must survive times without any connection
)


class LeaseRevokedByOperator(GpuLeaseError):
    """An operator revoked a prepared claim's lease. A restart of its pod must not acquire another one."""

    default_hint = "Delete the pod. The audit log says who revoked it, and why"


class ClaimReader(Protocol):
    """The part of the cluster's API that the driver uses."""

    def claim(self, namespace: str, name: str) -> object:
        """Return the ResourceClaim object from the API server. Raises ClusterRefused."""


class ClaimLeases:
    """Prepares claims on one node's daemon. Thread-safe; requests about the same claim run one after another."""

    def __init__(
        self,
        address: str,
        node: str,
        files: NodeFiles,
        reader: ClaimReader,
        lease_s: float,
        on_message: Callable[[str], None],
    ) -> None:
        """Raises InvalidRequest for a daemon on another host, because pods need its socket.

        Args:
            address: The daemon's address, `unix:PATH`.
            node: The node's name in the cluster.
            files: The records, tokens and specifications.
            reader: Reads claims.
            lease_s: Seconds of a lease if the claim does not set `leaseSeconds`.
            on_message: Called with messages for the log.
        """
        if not address.startswith("unix:/"):
            raise InvalidRequest(f"the daemon's address {address}: pods reach it by a Unix socket", "Say unix:/PATH")
        self._address, self._socket = address, Path(address.removeprefix("unix:"))
        self._node, self._files, self._reader = node, files, reader
        self._lease_s, self._on_message = lease_s, on_message
        self._guard, self._turns = threading.Lock(), dict[str, tuple[threading.Lock, int]]()

    # --- the kubelet's requests ---

    def prepare(self, ref: ClaimRef) -> list[PreparedDevice]:
        """Acquire a claim's leases, or return the ones that it has. Raises GpuLeaseError."""
        check_ref(ref)
        with self._turn(ref.uid):
            record = self._files.record(ref.uid)
            # State 1: left over from a killed driver, an earlier boot or expired leases. Free what remains, then start
            # over.
            if record is not None and not self._is_whole(record):
                self._end(record)
                record = None
            # State 2: not prepared. State 3: prepared, so the kubelet repeats itself: rewrite what a pod needs, in case
            # files were lost, and return the same devices.
            if record is None:
                record = self._acquire(ref)
            else:
                self._give_tokens(record)
                self._files.write_spec(record, self._socket)
            return [
                PreparedDevice(lease.request, lease.pool, lease.device, cdi_id(record.uid, number), lease.share_id)
                for number, lease in enumerate(record.leases)
            ]

    def unprepare(self, ref: ClaimRef) -> None:
        """End a claim's leases and wait for the proof. If it raises NotProvedFree, the record stays."""
        check_ref(ref)
        with self._turn(ref.uid):
            record = self._files.record(ref.uid)
            if record is not None:
                self._end(record)

    def lease_ids(self) -> set[str]:
        """Return the ids of the leases that claims hold, as in reports. Records that can't be read are skipped."""
        found: set[str] = set()
        for uid in self._files.uids():
            with suppress(RecordUnreadable, OSError):
                record = self._files.record(uid)
                found.update(lease.lease_id for lease in (() if record is None else record.leases))
        return found

    # --- tokens ---

    def refresh_tokens(self) -> None:
        """Write a new token for every pod. A failure for one claim or lease is logged, and retried at the next call.

        A claim that is being prepared or unprepared is skipped: its wait for a proof must not delay the others.
        """
        for uid in self._files.uids():
            with self._turn(uid, waits=False) as is_ours:
                if not is_ours:
                    continue
                try:
                    record = self._files.record(uid)
                    if record is not None and record.is_ready:
                        self._renew_tokens(record)
                except (GpuLeaseError, OSError) as error:
                    self._on_message(f"claim {uid}: no new tokens: {error}")

    def _renew_tokens(self, record: PreparedClaim) -> None:
        for number, lease in enumerate(record.leases):
            try:
                self._give_token(record, number)
            except (GpuLeaseError, OSError) as error:
                self._on_message(f"claim {record.uid}: no new token for lease {lease.lease_id}: {error}")
                # Drop the old token only if the lease is over: a daemon that is busy or starting refuses temporarily.
                if self._report(lease)["state"] != "active":
                    self._files.drop_token(record.uid, number)

    def _give_token(self, record: PreparedClaim, number: int) -> None:
        lease_id = lease_id_of(record.leases[number].lease_id)
        # Valid only for the pod's user, which the audience identifies.
        request = issue_request(lease_id, _POD_PERMISSIONS, bytes.fromhex(record.audience), TOKEN_S, 0)
        given = ask(Opcode.CAPABILITY_ISSUE, request, self._address)
        self._files.write_token(record, number, base64.urlsafe_b64encode(given.token).decode())

    def _give_tokens(self, record: PreparedClaim) -> None:
        for number in range(len(record.leases)):
            self._give_token(record, number)

    # --- leases ---

    def _acquire(self, ref: ClaimRef) -> PreparedClaim:
        # Check everything that can be refused before the first lease: the claim, its cards, and its pods' user.
        want = parse_claim(self._reader.claim(ref.namespace, ref.name), ref, DRIVER, self._node)
        # The scheduler knows cards by their device names, the daemon by their UUIDs.
        cards = {device_name(card["uuid"]): card for card in self._cards()}
        if missing := [device.device for device in want.devices if device.device not in cards]:
            raise UnusableClaim(
                f"this node has no card {missing[0][:64]!r}", "It was removed since the scheduler chose it"
            )
        # The user's audience on this node, which later tokens of the claim use, too.
        audience = audience_of_user(want.user, self._address, self._socket)
        record = PreparedClaim(ref.uid, boot_id(), want.user, audience.hex())
        try:
            # Step 1: a short lease for each device, each of them on the disk before the next is requested.
            for number, device in enumerate(want.devices):
                record = record.with_lease(self._lease(device, cards[device.device], request_id(ref.uid, number)))
                self._files.save(record)
            # Step 2: extend them to the claim's time; a renewal also ends old tokens, so tokens come after it.
            self._lengthen(record, want)
            self._give_tokens(record)
            self._files.write_spec(record, self._socket)
            # Step 3: mark as ready. Only now may the kubelet be notified, since a pod can start at once.
            record = replace(record, is_ready=True)
            self._files.save(record)
            return record
        except BaseException:
            # Leases that can't be ended now stay in the record, for the kubelet's next request.
            self._end(record)
            raise

    def _lease(self, device: DeviceWant, card: Any, request: bytes) -> HeldLease:
        # Without a size, the claim was given the whole card.
        size_bytes = card["capacity_bytes"] if device.size_bytes is None else device.size_bytes
        first_ms = milliseconds(FIRST_LEASE_S, "the first time", least_ms=1)
        # No queueing in the daemon: the kubelet retries, and would also retry during a wait.
        parameters = (*_PARAMETERS, REQUEST_ID.parameter(request.hex()))
        wanted = LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, first_ms, 0, card["uuid"], parameters)
        given = ask(Opcode.LEASE_ALLOC, wanted, self._address)
        return HeldLease(device.request, device.pool, device.device, device.share_id, str(LeaseId(given.lease_id)))

    def _lengthen(self, record: PreparedClaim, want: WantedDevices) -> None:
        # The claim's own `leaseSeconds` takes precedence over the driver's default.
        ttl_ms = milliseconds(want.lease_s or self._lease_s, "leaseSeconds", least_ms=1)
        for lease in record.leases:
            ask(Opcode.LEASE_RENEW, LeaseRenew(lease_id_of(lease.lease_id), ttl_ms), self._address)

    def _cards(self) -> list[dict[str, Any]]:
        return list(ask(Opcode.GET_INVENTORY, Empty(), self._address).details)

    def _report(self, lease: HeldLease) -> dict[str, Any]:
        return report_of(lease_id_of(lease.lease_id), self._address)

    def _is_whole(self, record: PreparedClaim) -> bool:
        """Return whether all leases of a claim are active, so that it need not be prepared again. Raises LeaseOver.

        The kubelet prepares before it creates a pod's sandbox, so the containers that used an ended lease are gone.
        """
        # Half prepared, or from before a reboot, which no lease survives.
        if not record.is_ready or record.boot_id != boot_id():
            return False
        reports = list(map(self._report, record.leases))
        # Expired is replaced silently; revoked is an operator's decision, and must not be undone by a restart.
        for lease, report in zip(record.leases, reports, strict=True):
            if report["cause"] == REVOKED:
                raise LeaseRevokedByOperator(f"an operator revoked the lease {lease.lease_id} of this claim")
        return all(report["state"] == "active" for report in reports)

    def _end(self, record: PreparedClaim) -> None:
        """Free a record's leases, wait until every byte is proved free, then delete the record.

        Raises NotProvedFree.
        """
        until_s = time.monotonic() + PROOF_LIMIT_S
        for lease in record.leases:
            # The leases share one limit, so that the kubelet gets an answer in time.
            left_s = max(until_s - time.monotonic(), LEAST_PROOF_S)
            free_and_prove(lease_id_of(lease.lease_id), self._address, left_s, self._on_message)
        self._files.forget(record.uid)

    @contextmanager
    def _turn(self, uid: str, *, waits: bool = True) -> Iterator[bool]:
        """Hold a claim's lock during the block. Yields False if `waits` is False and another thread holds it."""
        with self._guard:
            # Locks are created on demand, and counted so that the last user removes its lock.
            lock, users = self._turns.get(uid, (threading.Lock(), 0))
            self._turns[uid] = lock, users + 1
        is_ours = lock.acquire(blocking=waits)
        try:
            yield is_ours
        finally:
            if is_ours:
                lock.release()
            with self._guard:
                _, users = self._turns.pop(uid)
                if users > 1:
                    self._turns[uid] = lock, users - 1


def request_id(uid: str, number: int) -> bytes:
    """Return the request id, 16 bytes, by which a daemon recognises a repeated request for this lease of a claim."""
    return hashlib.sha256(f"gpulease dra 1 {uid} {number}".encode()).digest()[:16]


# --- the audience of a pod's user ---


def audience_of_user(user: int, address: str, socket: Path) -> bytes:
    """Return a user's audience, which a process of that user requests from the node. Raises GpuLeaseError."""
    # The daemon identifies peers by the kernel's credentials, so only a process of that user can ask.
    command = [sys.executable, "-P", "-m", __name__, str(user), str(socket.stat().st_gid), address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=AUDIENCE_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Disconnected(f"the node did not return user {user}'s audience") from None
    if done.returncode != 0 or not re.fullmatch("[0-9a-f]{64}\n", done.stdout):
        raise UnusableClaim(
            f"user {user} got no audience from the node: {done.stderr.strip()[-300:]}",
            "The user must be able to connect to the daemon's socket; the driver must be root, or that user",
        )
    return bytes.fromhex(done.stdout)


def _print_audience(user: int, group: int, address: str) -> None:
    """Become a user and print its audience. Everything is imported before: the user may not be able to read files."""
    if os.geteuid() != user:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    print(ask(Opcode.CAPABILITY_AUDIENCE, Empty(), address).audience.hex())


if __name__ == "__main__":
    _print_audience(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
