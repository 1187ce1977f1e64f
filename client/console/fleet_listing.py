"""A fleet's nodes and names, as its directories list them. The listing is checked when it is received."""

from typing import Any

from gpulease.client.console.reports import Report
from gpulease.client.core.fleet_acquire import Fleet, ask_directories
from gpulease.client.errors import Disconnected
from gpulease.client.sync.driver import drive
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty


def listing_of(fleet: Fleet) -> Report:
    """Ask a fleet's directories for its nodes and names. Raises Disconnected if none answers."""
    report: Any = drive(ask_directories(fleet, Opcode.FLEET_LIST, Empty())).report
    return _checked(report)


def _checked(report: Any) -> Report:
    """Check a directory's answer. Raises Disconnected if it is not a listing."""
    # Collect the members that are used later, by type, and check all of a type at once. A missing member raises here.
    try:
        texts = [text for node in report["nodes"] for text in (node["node_id"], node["version"], *node["addresses"])]
        texts += [name[key] for name in report["names"] for key in ("name", "node_id", "tenant", "lease_id")]
        texts += [text for node in report["nodes"] for label in node["labels"].items() for text in label]
        cards = [card for node in report["nodes"] for card in node["cards"]]
        numbers = [card[key] for card in cards for key in ("capacity_bytes", "largest_bytes", "leases")]
        numbers += [node["silent_ms"] for node in report["nodes"]] + [name["epoch"] for name in report["names"]]
        if all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers):
            return dict(report)
    except (AttributeError, KeyError, TypeError):
        pass
    raise Disconnected(
        "the directory's listing can't be read", "Do the versions of the directory and of this client differ?"
    )
