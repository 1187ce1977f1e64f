"""The command `gpulease fleet fence` (`python -m gpulease.daemon.fleet.fence`).

The command removes a node's record, after which the node can't send heartbeats or claim names. Its claimed leases end
by its membership deadline, so its names are free one horizon after the removal. An operator who is sure that the node
is powered off need not wait.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final

import click

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Put,
    Transaction,
)
from gpulease.daemon.fleet.etcd_options import EXIT_FAILED, NotDone, done, etcd_options
from gpulease.daemon.fleet.records.fleet_records import (
    HORIZON,
    NAMES,
    ClaimRecord,
    fenced_key,
    held_key,
    name_of,
    node_key,
    read_horizon_s,
)
from gpulease.daemon.fleet.records.record_reader import Unreadable
from gpulease.daemon.fleet.records.unreadable_records import shown_key
from gpulease.daemon.fleet.rules.fleet_events import DEFAULT_TERMS
from gpulease.daemon.fleet.rules.membership import node_removal

POLL_S: Final = 1.0
"""Maximum seconds of one sleep. A sleep does not count the time for which the host is suspended, so a long one would
end late."""


class NotFenced(Exception):
    """A node was not fenced, or its names are not free. The text contains the reason and advice."""


def boot_s() -> float:
    """Return seconds since the host's boot, including suspensions (clock_gettime(2), CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def fence(
    client: EtcdClient,
    node_id: str,
    *,
    waits: bool,
    report: Callable[[str], None],
    clock: Callable[[], float] = boot_s,
) -> list[str]:
    """Remove a node's record, wait until its claimed leases have ended, and free its names.

    Raises NotFenced and NotDone.

    Args:
        client: The client for etcd.
        node_id: The node.
        waits: False if the node is certainly powered off.
        report: Called with a sentence about each step.
        clock: A clock in seconds that continues while the host sleeps.

    Returns:
        The names that are free now.
    """
    # Step 1: read the node's record, and the horizon by which its leases end.
    key = node_key(node_id)
    answer = await done(client, Transaction(reads=(Get(key), Get(HORIZON))))
    node = next(iter(answer.found[0]), None)
    # Without a readable horizon, fail before anything is changed.
    horizon_s = _horizon_s(answer.found[1]) if waits else 0.0
    last_incarnation = answer.revision if node is None else node.create_revision
    # Step 2: remove the record. From then on the node's heartbeats and claims fail.
    if node is not None:
        # Remove the record only in the incarnation that was just read. A node that has joined again is alive.
        removal = Transaction((CreateRevisionIs(key, last_incarnation),), node_removal(node_id))
        if not (await done(client, removal)).succeeded:
            raise NotFenced(f"node {node_id} joined again during the fence: check it, and fence it again if necessary")
        report(f"Node {node_id} is fenced: it can't claim any more names, and its leases with names end.")
    # Without its record, the node can't claim more names. Step 3: list the node's names.
    names = await done(client, Transaction(reads=(Get(NAMES, is_prefix=True),)))
    claims = [item for item in names.found[0] if _is_of(item, node_id, last_incarnation, report)]
    if node is None and not claims:
        raise NotFenced(f"the fleet has no node {node_id}, and no name is claimed by such a node")
    # Step 4: wait until the node's leases have ended by their deadline.
    if waits and claims:
        wait_s = horizon_s * (1 + DEFAULT_TERMS.rho)
        report(f"Waiting {wait_s:.1f} s, until the node's leases with names have ended even if it can't be reached.")
        deadline_s = clock() + wait_s
        # Sleep in short steps, so that a suspension of this host counts.
        while (left_s := deadline_s - clock()) > 0:  # noqa: ASYNC110  # time passes, and nothing sets an event
            await asyncio.sleep(min(left_s, POLL_S))
    # Step 5: mark the fence, and free the names.
    if claims or not waits:
        # The mark stays. It proves to every node that the fenced node's earlier memberships are over.
        await done(client, Transaction((CreateRevisionIs(key, 0),), (Put(fenced_key(node_id), b""),)))
    return await _free_names(client, node_id, claims)


def _horizon_s(items: tuple[KeyValue, ...]) -> float:
    """Return the fleet's horizon in seconds, after which claimed leases of a silent node have ended.

    Raises NotFenced.
    """
    key_text = HORIZON.decode()
    if not items:
        raise NotFenced(
            f"etcd has no {key_text}, so it is unknown how long the node's leases can continue. Nothing "
            "was done. Start a node, which writes the key, and fence again; or cut the dead node's power "
            "and use --pulled-the-plug"
        )
    horizon_s = read_horizon_s(items[0].value)
    if isinstance(horizon_s, Unreadable):
        text = f"{key_text} can't be read ({horizon_s.reason}): nothing was done"
        raise NotFenced(f"{text}. Write the nodes' horizon_s to that key, and fence again")
    return horizon_s


def _is_of(item: KeyValue, node_id: str, last_incarnation: int, report: Callable[[str], None]) -> bool:
    """Return whether a claim belongs to one of the node's memberships so far. Reports an unreadable claim."""
    claim = ClaimRecord.read(item.value)
    if isinstance(claim, Unreadable):
        report(
            f"The claim {shown_key(item.key)} can't be read, so its node is unknown, and it was not deleted "
            f"({claim.reason})."
        )
        return False
    return claim.node_id == node_id and claim.incarnation <= last_incarnation


async def _free_names(client: EtcdClient, node_id: str, claims: list[KeyValue]) -> list[str]:
    freed = []
    for item in claims:
        name = name_of(item.key)
        if isinstance(name, Unreadable):
            continue
        # Compare the revision. A changed claim belongs to a later membership or to another node.
        removal = (Delete(item.key), Delete(held_key(node_id, name)))
        if (await done(client, Transaction((ModRevisionIs(item.key, item.mod_revision),), removal))).succeeded:
            freed.append(name)
    return freed


@click.command("fence", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("node")
@etcd_options
@click.option("--pulled-the-plug", is_flag=True, help="Do not wait: the node certainly has no power.")
@click.option("--yes", is_flag=True, help="Do not ask whether the node's power is off; for scripts.")
def main(node: str, etcd: EtcdSettings, pulled_the_plug: bool, yes: bool) -> None:
    """Remove NODE from the fleet. Its names become free one horizon later.

    With --pulled-the-plug its names are free at once. If the node were still running, two nodes would then serve them,
    so cut the node's power first.
    """
    if pulled_the_plug and not yes:
        click.confirm(f"If node {node} still runs, its names will be served twice. Is its power off?", abort=True)

    async def run() -> list[str]:
        client = EtcdClient(etcd)
        try:
            return await fence(client, node, waits=not pulled_the_plug, report=click.echo)
        finally:
            await client.close()

    try:
        # Print every expected failure as a sentence on standard error.
        freed = asyncio.run(run())
    except (NotFenced, NotDone, BadEtcdSettings) as error:
        click.echo(f"gpulease fleet fence: {error}", err=True)
        sys.exit(EXIT_FAILED)
    click.echo(f"Free names: {', '.join(sorted(freed))}." if freed else "The node had no names.")


if __name__ == "__main__":
    main(prog_name="gpulease fleet fence")
