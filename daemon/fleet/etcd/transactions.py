"""etcd's transactions, answers and changes as values, without a network (etcd v3, rpc.proto: Txn, Range, Watch).

A transaction compares revisions, and writes if all comparisons hold. Each write of the store increases the revision. A
key's create revision is that of the write that created the key, and its mod revision that of its last write. In
comparisons, an absent key has revision 0.
"""

from typing import NamedTuple

from gpulease.protocol.fast_dataclass import dataclass


class KeyValue(NamedTuple):
    """A key with its value at the revision that was read."""

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
    """The removal of a key. If the key is absent, it does nothing."""

    key: bytes


class Get(NamedTuple):
    """A read of a key, or of all keys with this prefix."""

    key: bytes
    is_prefix: bool = False


Compare = CreateRevisionIs | ModRevisionIs


@dataclass(frozen=True, slots=True)
class Transaction:
    """An atomic step: the writes, if every comparison holds, and then the reads in any case.

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
    """etcd's answer to a transaction, on which a majority of its members agreed.

    Attributes:
        succeeded: Whether the comparisons held and the writes are done.
        revision: The store's revision after the transaction. If the transaction wrote, it is the revision of the
            writes.
        found: The result of each read, sorted by key.
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
    """etcd did not execute the transaction, because it is out of space or this user may not write these keys."""

    reason: str


Outcome = TransactionAnswer | Unknown | TransactionRejected


class StoreSize(NamedTuple):
    """The size of a member's database.

    Attributes:
        size_bytes: Size of the file in bytes. A compaction frees space within the file. A defragmentation makes the
            file smaller.
        quota_bytes: The size in bytes above which a member rejects writes; 0 before etcd 3.6, which does not report it.
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
    """A watch's next changes, in the order of their revisions.

    The watch has now reported all changes up to `revision`. An empty batch means that there were none.
    """

    revision: int
    changes: tuple[KeyValue | Removed, ...] = ()


class WatchEnded(Exception):
    """The base of the errors after which a watch can't continue."""


class Compacted(WatchEnded):
    """etcd no longer has the next changes of a watch. The caller reads everything again.

    Attributes:
        revision: The first revision from which etcd still has all changes.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd has no changes before revision {revision} any more: read the keys again")
        self.revision = revision


class WatchRefused(WatchEnded):
    """etcd refuses a watch, because this user may not read these keys."""
