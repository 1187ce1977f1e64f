"""A lease id as an argument: complete, or only its first digits. The shell completes it from the daemon's list."""

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
"""Longest time for the daemon to list leases for a completion, in seconds. After that there is no completion."""

MAX_COMPLETIONS: Final = 256
"""Maximum number of ids offered to a shell, which asks before it shows more than fit on the screen."""

MIN_PREFIX_DIGITS: Final = 4
"""Minimum number of digits of an id's prefix. Fewer are more likely a mistake than a choice."""

MAX_LISTED: Final = 8
"""Maximum number of leases that the error about an ambiguous prefix lists."""

_PREFIX: Final = re.compile(f"[0-9a-fA-F]{{{MIN_PREFIX_DIGITS},31}}")
_LEASE_ID: Final = re.compile("[0-9a-fA-F]{32}")
"""Matches a complete id. Only ids of this form are passed from the daemon to a shell's command line, so that a daemon
can't put a command there."""


def lease_id_argument(
    *, required: bool = True, variable: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the argument LEASE_ID: a complete id, or the first digits of exactly one lease that this user may see.

    Args:
        required: Whether the argument is required.
        variable: The environment variable whose value is used if the argument is missing.
    """
    return click.argument(
        "lease_id",
        required=required,
        envvar=variable,
        callback=_parse_lease_id,
        shell_complete=complete_lease_ids,
    )


def _parse_lease_id(ctx: click.Context, param: click.Parameter, value: str | None) -> LeaseId | None:
    # The argument is missing, or the shell is only completing the line.
    if value is None or ctx.resilient_parsing:
        return None
    # Do not look up a complete id, because a lease that has ended is not listed, but may still be queried.
    if _LEASE_ID.fullmatch(value):
        return lease_id_of(value)
    if not _PREFIX.fullmatch(value):
        raise click.BadParameter(
            f"it must be a lease id of 32 hexadecimal digits, or at least the first {MIN_PREFIX_DIGITS} "
            f"digits of one, not {value!r}. Copy one from `gpulease leases`.",
            ctx,
            param,
        )
    return _lease_with_prefix(value.lower())


def _lease_with_prefix(prefix: str) -> LeaseId:
    """The only lease with these first digits. Raises NotFound, or InvalidRequest if there are several."""
    # The list has only leases that this user may see, so a prefix reveals nothing about other users' leases.
    ids = [lease["lease_id"] for lease in leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)]
    matches = [text for text in ids if _LEASE_ID.fullmatch(text) and text.startswith(prefix)]
    if not matches:
        raise NotFound(
            f"no lease that you may see has an id that begins with {prefix}",
            "See `gpulease leases`; the id of an ended lease must be given in full",
        )
    if len(matches) > 1:
        listed = ", ".join(matches[:MAX_LISTED]) + (" and more" if len(matches) > MAX_LISTED else "")
        raise InvalidRequest(f"{len(matches)} leases begin with {prefix}: {listed}", "Give more digits")
    return lease_id_of(matches[0])


def complete_lease_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of leases that this user may see; none if the daemon does not answer in time."""
    items: list[CompletionItem] = []
    # Ask in a thread that is abandoned after the limit, because resolving a host name has no time limit.
    thread = threading.Thread(target=_list_leases_into, args=(items, incomplete.lower()), daemon=True)
    thread.start()
    thread.join(COMPLETION_LIMIT_S)
    return list(items)


def _list_leases_into(items: list[CompletionItem], begin: str) -> None:
    # Drop every error, because its message would appear in the shell's command line.
    with suppress(Exception):
        report = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
        those = (lease for lease in report if _LEASE_ID.fullmatch(lease["lease_id"]))
        items += [_item(lease) for lease in those if lease["lease_id"].startswith(begin)][:MAX_COMPLETIONS]


def _item(lease: dict[str, object]) -> CompletionItem:
    # The tenant's name may contain anything. shown() escapes the characters that a terminal would interpret.
    description = f"{lease['tenant']}, {lease['state']}, {size_text(int(str(lease['size_bytes'])))}"
    return CompletionItem(str(lease["lease_id"]), help=shown(description))
