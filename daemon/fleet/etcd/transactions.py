"""etcd's transactions, answers and changes as values, without a network (etcd v3, rpc.proto: Txn, Range, Watch).

A transaction compares revisions, and writes if all comparisons hold. Revisions are numbers of the whole store that only
rise. A key's create revision is that of the write that made it, its mod revision that of its last write. A key that is
absent has the revision 0 in comparisons.
"""

from dataclasses import dataclass
from typing import NamedTuple


class KeyValue(NamedTuple):
    """A key as it was read."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class CreateRevisionIs(NamedTuple):
    """A comparison: the key's create revision is this; 0: the key is absent."""

    key: bytes
    revision: int


class ModRevisionIs(NamedTuple):
    """A comparison: the key's mod revision is this; 0: the key is absent."""

    key: bytes
    revision: int


class Put(NamedTuple):
    """A write of a key."""

    key: bytes
    value: bytes


class Delete(NamedTuple):
    """The removal of a key; nothing if it is absent."""

    key: bytes


class Get(NamedTuple):
    """A read of a key, or of all keys that begin with it; `count_only`: of their number alone."""

    key: bytes
    is_prefix: bool = False
    count_only: bool = False


Compare = CreateRevisionIs | ModRevisionIs


@dataclass(frozen=True, slots=True)
class Transaction:
    """An atomic step: if every comparison holds, `writes`; then the reads, whether they held or not.

    Attributes:
        compares: Comparisons; none always hold.
        writes: Writes, each of another key.
        reads: Reads after the writes.
    """

    compares: tuple[Compare, ...] = ()
    writes: tuple[Put | Delete, ...] = ()
    reads: tuple[Get, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a transaction, which a majority of etcd's members agreed on.

    Attributes:
        succeeded: The comparisons held, and the writes are done.
        revision: The store's revision after it; that of the writes, if there were any.
        found: What each read found, in order of keys; nothing for one that counts.
        cluster_id: The cluster that answered.
        counts: How many keys each read met.
    """

    succeeded: bool
    revision: int
    found: tuple[tuple[KeyValue, ...], ...] = ()
    cluster_id: int = 0
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer came in time: the transaction was done, is still to be done, or never will be."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """etcd refused the transaction, and did none of it: no space is left, or this user may not write there."""

    reason: str


Outcome = Answer | Unknown | Rejected


class StoreSize(NamedTuple):
    """The size of a member's database.

    Attributes:
        size_bytes: Bytes of its file. A compaction frees parts of it, a defragmentation gives them back.
        quota_bytes: Its bound, above which no member writes; 0: this version does not say (before etcd 3.6).
    """

    endpoint: str
    size_bytes: int
    quota_bytes: int


class Removed(NamedTuple):
    """The removal of a watched key, by the write of that revision."""

    key: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """A watch's next changes, in order of their revisions. All up to `revision` have been told by then.

    A batch without changes says that there were none up to `revision`, and that the watch lives.
    """

    revision: int
    changes: tuple[KeyValue | Removed, ...] = ()


class WatchEnded(Exception):
    """Raised where a watch can't go on; the subclass says why."""


class Compacted(WatchEnded):
    """Raised where etcd no longer has the changes that a watch is to tell next. Its caller reads anew.

    Attributes:
        revision: etcd has all changes from here on.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd has no changes before revision {revision} any more: read the keys anew")
        self.revision = revision


class WatchRefused(WatchEnded):
    """Raised where etcd refuses a watch: this user may not read there."""
