"""Keeps the node's ResourceSlices in the cluster equal to its cards.

Other programs may change the slices. The kubelet deletes a driver's slices when the kubelet starts, and some time after
the driver has unregistered. So one thread lists and watches the slices, and another compares them with the cards and
writes differences.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.kubernetes.cluster_refusals import ClusterRefused
from gpulease.client.integrations.kubernetes.resource_pool import (
    ApiWrite,
    Owner,
    Verb,
    digest_of,
    dropped_fields,
    writes_to,
)
from gpulease.protocol.back_off import back_off_s

COMPARE_S: Final = 5.0
"""Seconds between two comparisons if no event comes. A change of a card is published at most this much later."""

WRITE_GAP_S: Final = 1.0
"""Minimum seconds between two rounds of writes, in case another program writes the same slices."""

RELIST_S: Final = 300.0
"""Seconds between two lists while a watch is open, because the watch's connection may be lost without an error."""

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 60.0
"""The first and the longest pause in seconds after a failed request. The pause doubles with each further failure."""

_GONE: Final = 410
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409

_GATES: Final = {
    "allowMultipleAllocations": "each claim gets a whole card: switch on the feature gate DRAConsumableCapacity "
    "(alpha in Kubernetes 1.34 and 1.35, beta in 1.36)",
    "taints": "cards that are fenced, sick or drained still get claims, which then fail on the node: switch on the "
    "feature gate DRADeviceTaints (alpha until Kubernetes 1.35, beta in 1.36)",
}


class Slices(Protocol):
    """The methods of KubernetesCluster that this module uses."""

    def node_uid(self, name: str) -> str: ...
    def slices(self, node: str) -> tuple[list[dict[str, Any]], str]: ...
    def watch_slices(self, node: str, version: str) -> Any: ...
    def create_slice(self, slice_object: Mapping[str, Any]) -> dict[str, Any]: ...
    def replace_slice(self, slice_object: Mapping[str, Any]) -> dict[str, Any]: ...
    def delete_slice(self, name: str) -> None: ...


class SlicePublisher:
    """Publishes the devices of one node in two threads, from the construction until `stop`."""

    def __init__(
        self,
        cluster: Slices,
        node: str,
        devices: Callable[[], Sequence[Mapping[str, Any]]],
        on_message: Callable[[str], None],
    ) -> None:
        """Begin to publish.

        Args:
            cluster: The API server.
            node: The node's name in the cluster.
            devices: Returns the current devices, or raises GpuLeaseError if they are not known yet. Called every
                COMPARE_S and after each event.
            on_message: Called with messages for the log.
        """
        self._cluster, self._node, self._devices, self._on_message = cluster, node, devices, on_message
        self._guard, self._changed, self._stopped = threading.Lock(), threading.Event(), threading.Event()
        self._stored: dict[str, dict[str, Any]] | None = None
        # For each slice, the digest of the devices that were sent last, and the digest of the devices that the server
        # stored.
        self._stored_as: dict[str, tuple[str, str]] = {}
        # The newest version that a list or the watch has reported. Versions can be compared as numbers, as Kubernetes
        # guarantees since 1.35 and etcd always has.
        self._version = 0
        # The number of the watch's events that changed the stored slices.
        self._events = 0
        self._owner: Owner | None = None
        self._last_problem = ""
        self._reported: set[str] = set()
        # Use daemon threads, because a watch may wait for minutes when the driver ends.
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run_watch, self._run_writes)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop publishing. The slices stay until the kubelet deletes them, if the driver does not register again."""
        self._stopped.set()
        self._changed.set()
        self._threads[1].join(LONGEST_PAUSE_S)

    @property
    def is_alive(self) -> bool:
        """Whether both threads run. A thread that a bug has ended has printed a traceback."""
        return all(thread.is_alive() for thread in self._threads)

    # --- reading ---

    def _run_watch(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                # Step 1: list the slices, which returns them with the version of the list.
                version = self._list()
                failures = 0
                # Step 2: watch the changes after that version. If the server ends the watch, the client continues it.
                for kind, slice_object in self._cluster.watch_slices(self._node, version):
                    self._apply_event(kind, slice_object)
                    if self._stopped.is_set():
                        return
            except ClusterRefused as refused:
                # Status 410 means that the version is too old to be watched, for example after a pause of this process.
                # Then list again.
                if refused.code != _GONE:
                    self._report(refused)
                    self._stopped.wait(back_off_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
                    failures += 1

    def _list(self) -> str:
        while True:
            events = self._events
            slices, version = self._cluster.slices(self._node)
            with self._guard:
                # If the watch has reported a change since, the list may lack the change, so list again. Versions do not
                # show this, because after a restore of etcd they may be lower.
                if self._events == events:
                    self._stored = {slice_object["metadata"]["name"]: slice_object for slice_object in slices}
                    self._version = int(version)
                    break
        self._changed.set()
        return version

    def _apply_event(self, kind: str, slice_object: dict[str, Any]) -> None:
        name, version = slice_object["metadata"]["name"], _version_of(slice_object)
        with self._guard:
            stored = self._stored
            # Ignore events from before the last list, or from before this driver's own write.
            if stored is None or version <= self._version or version < _version_of(stored.get(name)):
                return
            self._version = version
            self._events += 1
            if kind == "DELETED":
                stored.pop(name, None)
            elif kind in ("ADDED", "MODIFIED"):
                stored[name] = slice_object
        self._changed.set()

    # --- writing ---

    def _run_writes(self) -> None:
        failures, listed_at = 0, time.monotonic()
        while not self._stopped.is_set():
            self._changed.wait(COMPARE_S)
            self._changed.clear()
            try:
                if time.monotonic() - listed_at > RELIST_S:
                    self._list()
                    listed_at = time.monotonic()
                if self._reconcile():
                    self._stopped.wait(WRITE_GAP_S)
                    self._last_problem = ""
                failures = 0
            except ClusterRefused as refused:
                # Another program has written or deleted a slice. List again.
                if refused.code in (_CONFLICT, _NOT_FOUND):
                    self._owner = None
                    self._relist()
                if refused.code != _CONFLICT:
                    self._report(refused)
                self._stopped.wait(back_off_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
                failures += 1
                self._changed.set()

    def _relist(self) -> None:
        try:
            self._list()
        except ClusterRefused as refused:
            self._report(refused)

    def _reconcile(self) -> bool:
        """Make the slices equal to the devices. Returns whether anything was written. Raises ClusterRefused."""
        with self._guard:
            if self._stored is None:
                return False
            stored = list(self._stored.values())
        try:
            devices = self._devices()
        except GpuLeaseError as error:
            # The daemon has not answered since the driver's start. Keep the slices that an earlier driver published.
            self._report(error)
            return False
        owner = self._owner or Owner(self._node, self._cluster.node_uid(self._node))
        stored_as = dict(self._stored_as.values())
        writes = writes_to(devices, stored, owner, stored_as)
        if writes and self._owner is not None:
            # Read the Node's uid before each round of writes. A Node that was created again has another uid, and the
            # cluster deletes the old Node's slices.
            owner = Owner(self._node, self._cluster.node_uid(self._node))
            writes = writes_to(devices, stored, owner, stored_as)
        self._owner = owner
        for write in writes:
            self._write(write)
        return bool(writes)

    def _write(self, write: ApiWrite) -> None:
        if write.verb is Verb.DELETE:
            try:
                self._cluster.delete_slice(write.name)
            except ClusterRefused as refused:
                # The slice is already deleted.
                if refused.code != _NOT_FOUND:
                    raise
            with self._guard:
                (self._stored or {}).pop(write.name, None)
            return
        write_slice = self._cluster.create_slice if write.verb is Verb.CREATE else self._cluster.replace_slice
        written = write_slice(write.slice)
        # The server may have dropped fields of features that are off, and the watch will report the slice without them.
        sent, stored = write.slice["spec"]["devices"], written["spec"].get("devices") or ()
        self._stored_as[write.name] = digest_of(sent), digest_of(stored)
        for name in sorted(dropped_fields(write.slice, written) - self._reported):
            self._reported.add(name)
            self._on_message(
                f"the API server dropped {name} of the ResourceSlice: {_GATES.get(name, 'check its gates')}"
            )
        with self._guard:
            # Store the result, unless the watch has reported a later event.
            if self._stored is not None and _version_of(written) > self._version:
                self._stored[write.name] = written

    def _report(self, refused: GpuLeaseError) -> None:
        # Report each problem once.
        if str(refused) != self._last_problem:
            self._last_problem = str(refused)
            self._on_message(f"ResourceSlices: {refused}")


def _version_of(slice_object: Mapping[str, Any] | None) -> int:
    return 0 if slice_object is None else int(slice_object["metadata"]["resourceVersion"])
