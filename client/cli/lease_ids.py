"""A lease's id as an argument: how it is typed, whole or its beginning, and completed from the daemon."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from gpulease.client.cli.reports import leases_of
from gpulease.client.cli.tables import shown, size_text
from gpulease.client.errors import InvalidRequest, NotFound
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.lease_ids import LeaseId, lease_id_of
from gpulease.protocol.messages import Empty

COMPLETION_LIMIT_S: Final = 0.5
"""For the daemon to list leases while a person waits for a completion; later there are none."""

MAX_COMPLETIONS: Final = 256
"""Most ids given to a shell: nobody reads more, and it would ask before showing them anyway."""

MIN_PREFIX_DIGITS: Final = 4
"""Fewer first digits of an id are more likely a slip than a choice."""

MAX_TOLD: Final = 8
"""Most leases that an ambiguous beginning is said to stand for."""

_PREFIX: Final = re.compile(f"[0-9a-fA-F]{{{MIN_PREFIX_DIGITS},31}}")
_LEASE_ID: Final = re.compile("[0-9a-fA-F]{32}")
"""What is taken for one from a command line, and of what a daemon calls so, all that gets into a shell's line: anything
else there could be a command."""


def lease_id_argument(*, required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument LEASE_ID, of which the first digits will do if no other lease that this user sees has them."""
    return click.argument("lease_id", required=required, callback=_number_of, shell_complete=complete_lease_ids)


def _number_of(ctx: click.Context, param: click.Parameter, value: str | None) -> LeaseId | None:
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
    return _that_begins_with(value.lower())


def _that_begins_with(prefix: str) -> LeaseId:
    """The one lease of which these are the first digits. Raises NotFound, InvalidRequest if there are several."""
    ids = [lease["lease_id"] for lease in leases_of(ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report)]
    found = [text for text in ids if _LEASE_ID.fullmatch(text) and text.startswith(prefix)]
    if not found:
        raise NotFound(
            f"no lease that you may see begins with {prefix}",
            "See `gpulease leases`; one that has ended needs all 32 digits",
        )
    if len(found) > 1:
        told = ", ".join(found[:MAX_TOLD]) + (" and more" if len(found) > MAX_TOLD else "")
        raise InvalidRequest(f"{len(found)} leases begin with {prefix}: {told}", "Give more digits")
    return lease_id_of(found[0])


def complete_lease_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of leases that this user may see; none if the daemon does not say in time."""
    found: list[CompletionItem] = []
    # A thread that nothing waits for: looking up a host's name has no bound of its own.
    thread = threading.Thread(target=_list_into, args=(found, incomplete.lower()), daemon=True)
    thread.start()
    thread.join(COMPLETION_LIMIT_S)
    return list(found)


def _list_into(found: list[CompletionItem], begin: str) -> None:
    # Whatever is wrong, a shell's line is no place to say it.
    with suppress(Exception):
        report = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
        those = (lease for lease in report if _LEASE_ID.fullmatch(lease["lease_id"]))
        found += [_item(lease) for lease in those if lease["lease_id"].startswith(begin)][:MAX_COMPLETIONS]


def _item(lease: dict[str, object]) -> CompletionItem:
    about = f"{lease['tenant']}, {lease['state']}, {size_text(int(str(lease['size_bytes'])))}"
    return CompletionItem(str(lease["lease_id"]), help=shown(about))
