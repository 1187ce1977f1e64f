"""A tenant's quota in etcd: 16 shards, each with a part of the quota and the leases that count against it.

The quota is the sum of the shards' budgets, none of which is negative. An operator sets a quota for a tenant by name,
or the default for all others. Shards that were made from the default have the default's revision.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from json import dumps
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from gpulease.daemon.fleet.etcd.transactions import KeyValue, Put
from gpulease.daemon.fleet.records.fleet_records import QUOTA_DEFAULT, QUOTAS, NodeId, held_key
from gpulease.daemon.fleet.records.record_reader import (
    MAX_QUOTA_BYTES,
    LeaseText,
    Number,
    QuotaBytes,
    Unreadable,
    read_record,
)
from gpulease.protocol.fast_dataclass import dataclass

MAX_HELD_KEY_BYTES: Final = 4 << 10
"""Maximum bytes of an entry's key. A node's id has at most 255 bytes, and a tenant's quoted name 192."""

_LEASE: Final = re.compile("[0-9a-f]{32}")

SHARDS: Final = 16
"""Number of parts of a quota. Nodes that use different shards do not wait for each other."""


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard's value. An entry has, by lease, the node's id, the node's incarnation and the bytes."""

    budget: QuotaBytes
    used: dict[LeaseText, tuple[NodeId, Number, QuotaBytes]]
    default: Number


@dataclass(frozen=True, slots=True)
class DefaultRecord:
    total: QuotaBytes


@dataclass(slots=True)
class QuotaEntry:
    node_id: str
    incarnation: int
    size_bytes: int


@dataclass(slots=True)
class Shard:
    """A part of a quota, as read at `mod_revision`.

    Attributes:
        mod_revision: Its revision; 0 if absent.
        used: Entries by lease, in 32 hexadecimal digits.
        default_revision: Mod revision of the default that the shard was made from; 0 if the quota is the tenant's own.
        unreadable: Why its value is unreadable; "" if it is readable. Nodes do not change an unreadable shard.
    """

    key: bytes
    mod_revision: int
    budget_bytes: int = 0
    used: dict[str, QuotaEntry] = field(default_factory=dict)
    default_revision: int = 0
    unreadable: str = ""

    @property
    def is_readable(self) -> bool:
        """Whether its value is a shard's, or absent."""
        return not self.unreadable

    @property
    def used_bytes(self) -> int:
        """Bytes of its leases. They exceed the budget if an operator lowered the quota."""
        return sum(entry.size_bytes for entry in self.used.values())

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes)

    def put(self) -> Put:
        used = {lease: [entry.node_id, entry.incarnation, entry.size_bytes] for lease, entry in self.used.items()}
        record = {"budget": self.budget_bytes, "used": used, "default": self.default_revision}
        return Put(self.key, dumps(record, separators=(",", ":")).encode())


def has_sound_budgets(shards: Iterable[Shard]) -> bool:
    """Return whether all shards of a tenant are readable, and the sum of their budgets fits into one."""
    listed = list(shards)
    return all(shard.is_readable for shard in listed) and sum(shard.budget_bytes for shard in listed) <= MAX_QUOTA_BYTES


class DefaultQuota(NamedTuple):
    """The quota of all tenants without a quota of their own. `unreadable` is as in a shard."""

    total_bytes: int
    mod_revision: int
    unreadable: str = ""

    def put(self) -> Put:
        return Put(QUOTA_DEFAULT, dumps({"total": self.total_bytes}).encode())


def quota_prefix(tenant: str = "") -> bytes:
    """Return the prefix of the keys of a tenant's shards; without a tenant, of all shards."""
    return QUOTAS + quote(tenant, safe="").encode() + b"/" if tenant else QUOTAS


def shard_key(tenant: str, number: int) -> bytes:
    return quota_prefix(tenant) + b"%02d" % number


def tenant_of(key: bytes) -> str:
    return unquote(key.removeprefix(QUOTAS).rpartition(b"/")[0].decode(errors="replace"))


def held_entry_key(node_id: str, tenant: str, lease_id: str) -> bytes:
    """Return the key of a quota entry in its node's list. Unlike the key of a name, it contains a slash."""
    return held_key(node_id, f"{quote(tenant, safe='')}/{lease_id}")


def held_entry(key: bytes, node_id: str) -> tuple[str, str] | Unreadable:
    """Return tenant and lease of the quota entry with that key in its node's list."""
    # Build the key again from its parts. Another form of the key is unreadable.
    quoted, _, lease_id = key.removeprefix(held_key(node_id)).decode(errors="replace").partition("/")
    tenant = unquote(quoted)
    if (
        not _LEASE.fullmatch(lease_id)
        or len(key) > MAX_HELD_KEY_BYTES
        or held_entry_key(node_id, tenant, lease_id) != key
    ):
        return Unreadable("its key names no tenant's lease")
    return tenant, lease_id


def read_shards(items: Iterable[KeyValue]) -> dict[bytes, Shard]:
    return {item.key: _read_shard(item) for item in items}


def _read_shard(item: KeyValue) -> Shard:
    record = read_record(ShardRecord, item.value)
    if isinstance(record, Unreadable):
        return Shard(item.key, item.mod_revision, unreadable=record.reason)
    used = {lease: QuotaEntry(*entry) for lease, entry in record.used.items()}
    return Shard(item.key, item.mod_revision, record.budget, used, record.default)


def read_default(items: tuple[KeyValue, ...]) -> DefaultQuota | None:
    """Read the quota of tenants without their own; None if etcd has no such record."""
    if not items:
        return None
    record = read_record(DefaultRecord, items[0].value)
    if isinstance(record, Unreadable):
        return DefaultQuota(0, items[0].mod_revision, record.reason)
    return DefaultQuota(record.total, items[0].mod_revision)


def all_shards(tenant: str, shards: Mapping[bytes, Shard]) -> dict[bytes, Shard]:
    """Return all shards of a tenant, including those still to be created."""
    keys = [shard_key(tenant, number) for number in range(SHARDS)]
    return {key: shards.get(key) or Shard(key, 0) for key in keys}


def spread(shards: Iterable[Shard], total_bytes: int, default_revision: int = 0) -> None:
    """Set budgets with the sum `total_bytes`. If possible, each shard gets at least the bytes that it uses."""
    listed = list(shards)
    used = [shard.used_bytes for shard in listed]
    # Each shard gets the bytes that it uses, and an equal part of the remaining bytes.
    if (spare := total_bytes - sum(used)) >= 0:
        budgets = [size + spare // len(listed) for size in used]
    else:
        # The quota is smaller than its use. Scale every budget down, so that no shard has free bytes.
        budgets = [size * total_bytes // sum(used) for size in used]
    # The remainder of the division goes to the first shard or, if the quota is smaller than its use, to shards that use
    # more than their budget.
    rest_bytes = total_bytes - sum(budgets)
    for shard, size, budget_bytes in zip(listed, used, budgets, strict=True):
        share = rest_bytes if spare >= 0 else min(rest_bytes, size - budget_bytes)
        shard.budget_bytes, shard.default_revision = budget_bytes + share, default_revision
        rest_bytes -= share
