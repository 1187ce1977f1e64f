"""`gpulease fleet`: an operator's view of a fleet of nodes, and how to take a node out of it."""

import os
from typing import Any, Final

import click

from gpulease.client.cli.daemon_modules import FLEET, PASSES_ON, become_module, words_argument
from gpulease.client.cli.drain import cancel_option, drain_text, within_option
from gpulease.client.console.exit_status import if_interrupted
from gpulease.client.console.fleet_listing import listing_of
from gpulease.client.console.reports import Report, json_text
from gpulease.client.console.tables import MISSING, fitted, output_width, seconds_text, shown, size_text
from gpulease.client.core.fleet_acquire import Fleet
from gpulease.client.core.lease_request import fleet_of
from gpulease.client.errors import Denied, Disconnected, GpuLeaseError, InvalidRequest, NotFound
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import Body, Drain, DrainStatus, Empty

FENCE_MODULE: Final = "gpulease.daemon.fleet.fence"
QUOTA_MODULE: Final = "gpulease.daemon.fleet.quota"

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def fleet() -> None:
    """Manage a fleet of nodes. GPULEASE_ADDRESS names its directories: fleet:tls:HOST:PORT."""


@fleet.command()
@_as_json
def nodes(as_json: bool) -> None:
    """List the fleet's nodes, for operators: their free memory, and which are draining or silent."""
    listing = _operators_listing()
    nodes = listing["nodes"]
    # If the directory could not read some records, say so, and list the rest.
    if unreadable := listing.get("unreadable"):
        click.echo(f"gpulease: fleet nodes: {shown(str(unreadable))}", err=True)
    if as_json:
        click.echo(json_text(nodes))
        return
    head = ["node", "state", "address", "cards", "capacity", "largest free", "leases", "labels", "version"]
    rows = [
        [
            node["node_id"],
            _state(node),
            next(iter(node["addresses"]), MISSING),
            str(len(node["cards"])),
            size_text(sum(card["capacity_bytes"] for card in node["cards"])),
            size_text(max((card["largest_bytes"] for card in node["cards"]), default=0)),
            str(sum(card["leases"] for card in node["cards"])),
            ",".join(f"{name}={value}" for name, value in sorted(node["labels"].items())) or MISSING,
            node["version"] or MISSING,
        ]
        for node in nodes
    ]
    # A narrow terminal drops the columns that an operator needs least.
    texts = ("node", "address", "labels", "version")
    droppable = ("version", "labels", "capacity", "address")
    click.echo(fitted(head, rows, output_width(), title_column=0, droppable=droppable, texts=texts))


@fleet.command()
@_as_json
def names(as_json: bool) -> None:
    """List the names that the fleet serves: all of them if you are an operator, otherwise your own."""
    listing = _listing()
    if as_json:
        click.echo(json_text(listing["names"]))
        return
    head = ["name", "node", "epoch", "tenant", "lease"]
    rows = [
        [name["name"], name["node_id"], str(name["epoch"]), name["tenant"], name["lease_id"]]
        for name in listing["names"]
    ]
    click.echo(fitted(head, rows, output_width(), title_column=0, texts=("name", "node", "tenant", "lease")))


@fleet.command("drain")
@click.argument("node")
@within_option
@cancel_option
def drain_node(node: str, within_ms: int, cancel: bool) -> None:
    """Empty NODE, as `gpulease drain` does on its host: refuse new leases, and end the remaining ones by a deadline.

    The request goes to the node itself, so you must be an operator there.
    """
    op, body = (Opcode.DRAIN_CANCEL, Empty()) if cancel else (Opcode.DRAIN, Drain(within_ms))
    with if_interrupted(lambda: f"Node {node} may have received the request: see gpulease fleet nodes."):
        status: DrainStatus = _ask_node(_node(node), op, body)
    click.echo(shown(drain_text(f"Node {node}", status)))


@fleet.command("fence", **PASSES_ON)
@words_argument
def fence_node(words: tuple[str, ...]) -> None:
    """Remove a dead node from the fleet and free its names. See `gpulease fleet fence -h`."""
    become_module(FENCE_MODULE, words, FLEET)


@fleet.command("quota", **PASSES_ON)
@words_argument
def quota(words: tuple[str, ...]) -> None:
    """Set a tenant's quota over all nodes, or list the quotas. See `gpulease fleet quota -h`."""
    become_module(QUOTA_MODULE, words, FLEET)


def _fleet() -> Fleet:
    report = fleet_of(None)
    if report is None:
        raise InvalidRequest(
            f"GPULEASE_ADDRESS must name a fleet, not {os.environ.get(ADDRESS_VARIABLE, '')!r}",
            "Set it to the fleet's directories, fleet:tls:HOST:PORT",
        )
    return report


def _listing() -> Report:
    return listing_of(_fleet())


def _operators_listing() -> Report:
    """Return the fleet's nodes and names. Raises Denied unless the user is an operator: others see no nodes."""
    listing = _listing()
    # A directory of an older version does not say whether the user is an operator, and lists everything.
    if not listing.get("operator", True):
        raise Denied(
            "only operators can list the fleet's nodes", "The directory's option --operator names the operators."
        )
    return listing


def _state(node: Report) -> str:
    # A silent node's other figures are as old as its silence.
    if node["silent"]:
        return f"silent for {seconds_text(node['silent_ms'] / 1000)}"
    return "draining" if node["draining"] else "ready"


def _node(node_id: str) -> Report:
    for node in _operators_listing()["nodes"]:
        if node["node_id"] == node_id:
            return dict(node)
    raise NotFound(f"the fleet has no node {node_id}", "`gpulease fleet nodes` lists them")


def ask_about(lease_id: LeaseId, op: Opcode, body: Body) -> Any:
    """Send a request about a lease to the daemon that GPULEASE_ADDRESS names, or to the lease's node in a fleet.

    A directory lists only leases with names. Raises NotFound for a lease without one.
    """
    # Ask a single daemon directly. In a fleet, a directory first names the node that serves the lease's name.
    if fleet_of(None) is None:
        return ask(op, body)
    node_ids = [name["node_id"] for name in _listing()["names"] if name["lease_id"] == str(lease_id)]
    if not node_ids:
        raise NotFound(
            f"the fleet has no name for lease {lease_id}, or you may not see it",
            "Set GPULEASE_ADDRESS to the address of its node, with which the lease was acquired",
        )
    return _ask_node(_node(node_ids[0]), op, body)


def _ask_node(node: Report, op: Opcode, body: Body) -> Any:
    """Send a request to a node, at the first of its addresses that answers."""
    # Try its addresses in order. If none works, raise the last one's error.
    error: GpuLeaseError = Disconnected(f"node {node['node_id']} has no address")
    for address in node["addresses"]:
        try:
            return ask(op, body, address)
        except Disconnected as unreached:
            error = unreached
    raise error
