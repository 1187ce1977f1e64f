"""etcd as a linearizable store in memory, with revisions, and with the operations that a broken design uses."""

from dataclasses import dataclass, field

from gpulease.daemon.fleet.etcd.transactions import (
    Compare,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    Transaction,
    TransactionAnswer,
)
from gpulease.daemon.fleet.records.fleet_records import GENERATION


@dataclass
class ModelEtcd:
    """Keys with their revisions. Each transaction is one step."""

    cluster_id: int = 7
    revision: int = 1
    keys: dict[bytes, KeyValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys.setdefault(GENERATION, KeyValue(GENERATION, b"first", 1, 1))

    def do(self, transaction: Transaction) -> TransactionAnswer:
        """Execute a transaction, and reply as etcd does."""
        succeeded = all(map(self.holds, transaction.compares))
        if succeeded and transaction.writes:
            touched = [write.key for write in transaction.writes]
            assert len(touched) == len(set(touched)), "etcd refuses two writes of one key"
            self.revision += 1
            for write in transaction.writes:
                if isinstance(write, Delete):
                    self.keys.pop(write.key, None)
                else:
                    old = self.keys.get(write.key)
                    created = old.create_revision if old else self.revision
                    self.keys[write.key] = KeyValue(write.key, write.value, created, self.revision)
        found = tuple(self.read(get) for get in transaction.reads)
        return TransactionAnswer(succeeded, self.revision, found, self.cluster_id)

    def holds(self, compare: Compare) -> bool:
        found = self.keys.get(compare.key)
        if isinstance(compare, CreateRevisionIs):
            return compare.revision == (found.create_revision if found else 0)
        return compare.revision == (found.mod_revision if found else 0)

    def read(self, get: Get) -> tuple[KeyValue, ...]:
        if get.is_prefix:
            return tuple(self.keys[key] for key in sorted(self.keys) if key.startswith(get.key))
        return (self.keys[get.key],) if get.key in self.keys else ()

    def delete(self, *keys: bytes) -> None:
        """Delete keys in one step, as etcd itself does when a lease is revoked."""
        self.revision += 1
        for key in keys:
            self.keys.pop(key, None)

    def copy(self) -> "ModelEtcd":
        return ModelEtcd(self.cluster_id, self.revision, dict(self.keys))
