"""etcd's transactions, answers and changes as values, without a network (etcd v3, rpc.proto: Txn, Range, Watch).

A transaction compares revisions, and writes if all comparisons hold. Revisions number all writes of the store, and only
rise. A key's create revision belongs to the write that created it, its mod revision to its last write. In comparisons,
an absent key has revision 0.
"""

from typing import NamedTuple

from gpulease.protocol.fast_dataclass import dataclass


class KeyValue(NamedTuple):
    """A key with its value, as of the revision that was read."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class CreateRevisionIs(NamedTuple):
    """A comparison: the key has this create revision, or is absent if the revision is 0."""

    key: bytes
    revision: int


class ModRevisionIs(NamedTuple):
    """A comparison: the key has this mod revision, or is absent if the revision is 0."""

    key: bytes
    revision: int


class Put(NamedTuple):
    key: bytes
    value: bytes


class Delete(NamedTuple):
    """The removal of a key; does nothing if the key is absent."""

    key: bytes


class Get(NamedTuple):
    """A read of a key, or of all keys with that prefix."""

    key: bytes
    is_prefix: bool = False


Compare = CreateRevisionIs | ModRevisionIs


@dataclass(frozen=True, slots=True)
class Transaction:
    """An atomic step: `writes` if every comparison holds; then the reads, in either case.

    Attributes:
        compares: The comparisons; an empty tuple always holds.
        writes: The writes, each of a different key.
        reads: The reads after the writes.
    """

    compares: tuple[Compare, ...] = ()
    writes: tuple[Put | Delete, ...] = ()
    reads: tuple[Get, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionAnswer:
    """The answer to a transaction, which a majority of etcd's members agreed on.

    Attributes:
        succeeded: Whether the comparisons held, so that the writes are done.
        revision: The store's revision after the transaction; if it wrote, the revision of the writes.
        found: The results of each read, in order of keys.
        cluster_id: The cluster that answered.
    """

    succeeded: bool
    revision: int
    found: tuple[tuple[KeyValue, ...], ...] = ()
    cluster_id: int = 0


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer came in time. The transaction was done, will be done later, or will never be done."""

    reason: str


@dataclass(frozen=True, slots=True)
class TransactionRejected:
    """etcd refused the whole transaction, because it is out of space or this user may not write these keys."""

    reason: str


Outcome = TransactionAnswer | Unknown | TransactionRejected


class StoreSize(NamedTuple):
    """The size of a member's database.

    Attributes:
        size_bytes: Size of the file. A compaction frees parts of the file, a defragmentation returns them to the host.
        quota_bytes: The size above which a member refuses writes; 0 if this version does not report it (before etcd
          3.6).
    """

    endpoint: str
    size_bytes: int
    quota_bytes: int


class Removed(NamedTuple):
    """The removal of a watched key, by the write with that revision."""

    key: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """A watch's next changes, in order of their revisions. The watch has now reported all changes up to `revision`.

    An empty batch shows that nothing changed up to `revision`, and that the watch is alive.
    """

    revision: int
    changes: tuple[KeyValue | Removed, ...] = ()


class WatchEnded(Exception):
    """A watch can't continue, for the reason that the subclass names."""


class Compacted(WatchEnded):
    """etcd no longer has the next changes of a watch. The caller reads everything again.

    Attributes:
        revision: The first revision from which etcd still has all changes.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd has no changes before revision {revision} any more: read the keys again")
        self.revision = revision


class WatchRefused(WatchEnded):
    """etcd refuses a watch: this user may not read there."""
