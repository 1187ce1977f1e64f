"""A lease's id as an argument: typed whole or by its first digits, and completed from the daemon's list."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from gpulease.client.console.reports import leases_of
from gpulease.client.console.tables import shown, size_text
from gpulease.client.errors import InvalidRequest, NotFound
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.messages import Empty

COMPLETION_LIMIT_S: Final = 0.5
"""Seconds for the daemon to list leases while a person waits for a completion; after that there is none."""

MAX_COMPLETIONS: Final = 256
"""Most ids given to a shell. A shell asks before it shows more, and nobody reads them."""

MIN_PREFIX_DIGITS: Final = 4
"""Least digits of an id's beginning; fewer are more likely a slip than a choice."""

MAX_LISTED: Final = 8
"""Most leases listed for an ambiguous beginning."""

_PREFIX: Final = re.compile(f"[0-9a-fA-F]{{{MIN_PREFIX_DIGITS},31}}")
_LEASE_ID: Final = re.compile("[0-9a-fA-F]{32}")
"""An id on the command line. Of the daemon's ids, only texts of this form reach a shell's line: another text there
could be a command."""


def lease_id_argument(
    *, required: bool = True, variable: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the argument LEASE_ID: a whole id, or the first digits of just one lease that this user may see.

    Args:
        required: Whether there must be one.
        variable: The environment variable that has the id if no argument has.
    """
    return click.argument(
        "lease_id",
        required=required,
        envvar=variable,
        callback=_parse_lease_id,
        shell_complete=complete_lease_ids,
    )


def _parse_lease_id(ctx: click.Context, param: click.Parameter, value: str | None) -> LeaseId | None:
    if value is None or ctx.resilient_parsing:
        return None
    if _LEASE_ID.fullmatch(value):
        return lease_id_of(value)
    if not _PREFIX.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a lease id, which has 32 hexadecimal digits, nor {MIN_PREFIX_DIGITS} or more of its"
            " first. Copy one from `gpulease leases`.",
            ctx,
            param,
        )
    return _lease_with_prefix(value.lower())


def _lease_with_prefix(prefix: str) -> LeaseId:
    """Return the one lease with these first digits. Raises NotFound, InvalidRequest if there are several."""
    ids = [lease["lease_id"] for lease in leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)]
    found = [text for text in ids if _LEASE_ID.fullmatch(text) and text.startswith(prefix)]
    if not found:
        raise NotFound(
            f"no lease that you may see begins with {prefix}",
            "See `gpulease leases`; one that has ended needs all 32 digits",
        )
    if len(found) > 1:
        listed = ", ".join(found[:MAX_LISTED]) + (" and more" if len(found) > MAX_LISTED else "")
        raise InvalidRequest(f"{len(found)} leases begin with {prefix}: {listed}", "Give more digits")
    return lease_id_of(found[0])


def complete_lease_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return ids of leases that this user may see; none if the daemon does not answer in time."""
    found: list[CompletionItem] = []
    # A thread that is abandoned after the limit: looking up a host's name has no bound of its own.
    thread = threading.Thread(target=_list_leases_into, args=(found, incomplete.lower()), daemon=True)
    thread.start()
    thread.join(COMPLETION_LIMIT_S)
    return list(found)


def _list_leases_into(found: list[CompletionItem], begin: str) -> None:
    # A message would be printed into the shell's command line, so every error is dropped.
    with suppress(Exception):
        report = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
        those = (lease for lease in report if _LEASE_ID.fullmatch(lease["lease_id"]))
        found += [_item(lease) for lease in those if lease["lease_id"].startswith(begin)][:MAX_COMPLETIONS]


def _item(lease: dict[str, object]) -> CompletionItem:
    about = f"{lease['tenant']}, {lease['state']}, {size_text(int(str(lease['size_bytes'])))}"
    return CompletionItem(str(lease["lease_id"]), help=shown(about))
