"""A lease id as an argument: complete, or its first digits; completed by the shell from the daemon's list."""

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
"""Longest time for the daemon to list leases while a person waits for a completion, in seconds; then there is none."""

MAX_COMPLETIONS: Final = 256
"""Maximum number of ids offered to a shell, which asks before it shows more than fit on the screen."""

MIN_PREFIX_DIGITS: Final = 4
"""Minimum number of digits of an id's prefix; fewer are more likely a slip than a choice."""

MAX_LISTED: Final = 8
"""Maximum number of leases that the error about an ambiguous prefix lists."""

_PREFIX: Final = re.compile(f"[0-9a-fA-F]{{{MIN_PREFIX_DIGITS},31}}")
_LEASE_ID: Final = re.compile("[0-9a-fA-F]{32}")
"""A complete id. Only ids of this form may come from the daemon to a shell's command line. Stops a daemon from placing
a command there."""


def lease_id_argument(
    *, required: bool = True, variable: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the argument LEASE_ID: a complete id, or the first digits of exactly one lease that this user may see.

    Args:
        required: Whether the argument is required.
        variable: The environment variable that has the id if the argument is missing.
    """
    return click.argument(
        "lease_id",
        required=required,
        envvar=variable,
        callback=_parse_lease_id,
        shell_complete=complete_lease_ids,
    )


def _parse_lease_id(ctx: click.Context, param: click.Parameter, value: str | None) -> LeaseId | None:
    # Nothing was given, or a shell only completes the line.
    if value is None or ctx.resilient_parsing:
        return None
    # A complete id is not looked up: it may have ended, and still be queried.
    if _LEASE_ID.fullmatch(value):
        return lease_id_of(value)
    if not _PREFIX.fullmatch(value):
        raise click.BadParameter(
            f"it must be a lease id of 32 hexadecimal digits, or at least {MIN_PREFIX_DIGITS} of its first digits, "
            f"not {value!r}. Copy one from `gpulease leases`.",
            ctx,
            param,
        )
    return _lease_with_prefix(value.lower())


def _lease_with_prefix(prefix: str) -> LeaseId:
    """The only lease with these first digits. Raises NotFound, or InvalidRequest if there are several."""
    # The list has only leases that this user may see, so a prefix reveals nothing about others'.
    ids = [lease["lease_id"] for lease in leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)]
    matches = [text for text in ids if _LEASE_ID.fullmatch(text) and text.startswith(prefix)]
    if not matches:
        raise NotFound(
            f"no lease that you may see begins with {prefix}",
            "See `gpulease leases`; one that has ended needs all 32 digits",
        )
    if len(matches) > 1:
        listed = ", ".join(matches[:MAX_LISTED]) + (" and more" if len(matches) > MAX_LISTED else "")
        raise InvalidRequest(f"{len(matches)} leases begin with {prefix}: {listed}", "Give more digits")
    return lease_id_of(matches[0])


def complete_lease_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of leases that this user may see; none if the daemon does not answer in time."""
    items: list[CompletionItem] = []
    # In a thread that is abandoned after the limit: resolving a host name has no time limit of its own.
    thread = threading.Thread(target=_list_leases_into, args=(items, incomplete.lower()), daemon=True)
    # Wait for the answer, but no longer than a person would.
    thread.start()
    thread.join(COMPLETION_LIMIT_S)
    return list(items)


def _list_leases_into(items: list[CompletionItem], begin: str) -> None:
    # Drop every error: its message would appear in the shell's command line.
    with suppress(Exception):
        report = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
        those = (lease for lease in report if _LEASE_ID.fullmatch(lease["lease_id"]))
        items += [_item(lease) for lease in those if lease["lease_id"].startswith(begin)][:MAX_COMPLETIONS]


def _item(lease: dict[str, object]) -> CompletionItem:
    # The tenant's name may contain anything: shown() escapes what a shell's line would interpret.
    description = f"{lease['tenant']}, {lease['state']}, {size_text(int(str(lease['size_bytes'])))}"
    return CompletionItem(str(lease["lease_id"]), help=shown(description))
