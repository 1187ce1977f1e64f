"""The command `gpulease fleet quota` (`python -m gpulease.daemon.fleet.quota`).

Quotas are in etcd and apply to all nodes. A tenant has one if its settings have `fleet_quota = true`. Before a node
grants a lease to such a tenant, it claims the lease's bytes of the quota.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Final

import click

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Get, KeyValue, ModRevisionIs, Transaction
from gpulease.daemon.fleet.etcd_options import EXIT_FAILED, NotDone, done, etcd_options
from gpulease.daemon.fleet.records.fleet_records import QUOTA_DEFAULT
from gpulease.daemon.fleet.records.record_reader import MAX_QUOTA_BYTES
from gpulease.daemon.fleet.records.unreadable_records import shown_key
from gpulease.daemon.fleet.rules.quota_records import (
    DefaultQuota,
    Shard,
    all_shards,
    quota_prefix,
    read_default,
    read_shards,
    spread,
    tenant_of,
)
from gpulease.daemon.remote.tls_settings import OVER_TCP, check_tenant
from gpulease.protocol.counts import counted
from gpulease.protocol.sizes import parse_size, size_text

DEFAULT: Final = "default"
"""The name that stands for all tenants without a quota of their own, like `[tenants.default]` in the settings."""

ATTEMPTS: Final = 8
"""Maximum number of attempts to set a quota. An attempt fails if a lease begins or ends at the same time."""


class NotSet(Exception):
    """A quota was not set. The text contains the reason and advice."""


async def set_quota(client: EtcdClient, tenant: str, total_bytes: int) -> int:
    """Set a tenant's quota. Existing leases stay. Raises NotSet and NotDone.

    Returns:
        The bytes that the tenant's leases use now.
    """
    for _ in range(ATTEMPTS):
        # Step 1: read all shards. An unreadable shard is not overwritten, because it may contain leases.
        answer = await done(client, Transaction(reads=(Get(quota_prefix(tenant), is_prefix=True),)))
        shards = all_shards(tenant, read_shards(answer.found[0])).values()
        for shard in shards:
            if not shard.is_readable:
                key = shown_key(shard.key)
                text = f"{key} in etcd can't be read as a part of a quota ({shard.unreadable})"
                raise NotSet(f"{text}: once the leases of this part have ended, run `etcdctl del {key}`")
        # Step 2: write new budgets, but only if no shard has changed since.
        spread(shards, total_bytes)
        compares = tuple(ModRevisionIs(shard.key, shard.mod_revision) for shard in shards)
        if (await done(client, Transaction(compares, tuple(shard.put() for shard in shards)))).succeeded:
            return sum(shard.used_bytes for shard in shards)
    # During every attempt, a lease began or ended.
    raise NotSet(f"leases of {tenant} began or ended during each of {ATTEMPTS} attempts: run this command again")


async def set_default(client: EtcdClient, total_bytes: int) -> None:
    """Set the quota of all tenants without a quota of their own. Raises NotDone."""
    await done(client, Transaction(writes=(DefaultQuota(total_bytes, 0).put(),)))


async def describe(client: EtcdClient, tenant: str = "") -> list[str]:
    """Return sentences about the quota of one tenant or of all, and about the default. Raises NotDone."""
    # Read everything at once, so that the sentences describe one moment.
    reads = Get(quota_prefix(tenant), is_prefix=True), Get(QUOTA_DEFAULT)
    answer = await done(client, Transaction(reads=reads))
    default = read_default(answer.found[1])
    lines = list(_sentences(answer.found[0]))
    if tenant in ("", DEFAULT):
        default_text = "no quota, so their leases are refused" if default is None else size_text(default.total_bytes)
        if default is not None and default.unreadable:
            default_text = (
                f"a quota that can't be read ({default.unreadable}), so their leases are refused: set it again,"
            )
        lines.append(f"{DEFAULT}: {default_text} for each tenant without a quota of its own.")
    return lines or [f"{tenant}: no quota of its own, and no lease under the default quota yet."]


def _sentences(items: tuple[KeyValue, ...]) -> Iterator[str]:
    of_tenants: dict[str, list[Shard]] = {}
    for key, shard in read_shards(items).items():
        of_tenants.setdefault(tenant_of(key), []).append(shard)
    # One sentence for each tenant: the quota, its origin, its use, and the nodes that use it.
    for tenant, shards in sorted(of_tenants.items()):
        broken = next((shard for shard in shards if not shard.is_readable), None)
        if broken is not None:
            location = f"{shown_key(broken.key)}: {broken.unreadable}"
            yield f"{tenant}: a part of its quota can't be read, so its leases are refused ({location})."
            continue
        entries = [entry for shard in shards for entry in shard.used.values()]
        nodes: Counter[str] = Counter()
        for entry in entries:
            nodes[entry.node_id] += entry.size_bytes
        total, used = sum(shard.budget_bytes for shard in shards), sum(shard.used_bytes for shard in shards)
        origin = " by default" if any(shard.default_revision for shard in shards) else ""
        location = ", ".join(f"{size_text(size)} on {node}" for node, size in sorted(nodes.items()))
        of_nodes = f": {location}" if location else ""
        leases = counted(len(entries), "lease uses", "leases use")
        yield f"{tenant}: {size_text(total)}{origin}, of which {leases} {size_text(used)}{of_nodes}."


async def run(etcd: EtcdSettings, tenant: str, total_bytes: int | None) -> list[str]:
    """Set a quota, or describe quotas if `total_bytes` is None. Returns sentences. Raises NotSet and NotDone."""
    client = EtcdClient(etcd)
    try:
        if total_bytes is None:
            return await describe(client, tenant)
        if tenant == DEFAULT:
            await set_default(client, total_bytes)
            return [f"Each tenant without a quota of its own has {size_text(total_bytes)}."]
        used_bytes = await set_quota(client, tenant, total_bytes)
        return [f"{tenant} has {size_text(total_bytes)} in the fleet; leases use {size_text(used_bytes)}."]
    finally:
        await client.close()


def _tenant(context: click.Context, option: click.Parameter, value: str | None) -> str:
    # `default`, and the names of local users and of plain TCP, can't be names in certificates.
    if not value or value in (DEFAULT, OVER_TCP) or value.startswith("uid:"):
        return value or ""
    try:
        return check_tenant(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    try:
        size_bytes = None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size_bytes is not None and size_bytes > MAX_QUOTA_BYTES:
        raise click.BadParameter(f"a quota must have at most {size_text(MAX_QUOTA_BYTES)}, not {value}")
    return size_bytes


@click.command("quota", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tenant", required=False, callback=_tenant)
@click.argument("size", required=False, callback=_size)
@etcd_options
def main(tenant: str, size: int | None, etcd: EtcdSettings) -> None:
    """Set TENANT's quota of VRAM over all nodes of the fleet to SIZE, such as 256GiB; without SIZE, show the quota.

    The tenant `default` stands for all tenants without a quota of their own. A quota applies to the tenants that have
    `fleet_quota = true` in the nodes' settings.
    """
    try:
        lines = asyncio.run(run(etcd, tenant, size))
    except (NotSet, NotDone, BadEtcdSettings) as error:
        click.echo(f"gpulease fleet quota: {error}", err=True)
        sys.exit(EXIT_FAILED)
    for sentence in lines:
        click.echo(sentence)


if __name__ == "__main__":
    main(prog_name="gpulease fleet quota")
