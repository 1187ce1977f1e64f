"""A lease's id as an argument: how it is typed, and completed from the daemon."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from gpulease.client.asking import ask
from gpulease.client.cli.cells import shown
from gpulease.client.cli.tables import size_text
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty

COMPLETION_LIMIT_S: Final = 0.5
"""For the daemon to list leases while a person waits for a completion; later there are none."""

MAX_COMPLETIONS: Final = 256
"""Most ids given to a shell: nobody reads more, and it would ask before showing them anyway."""

_LEASE_ID: Final = re.compile("[0-9a-fA-F]{32}")
"""What is taken for one from a command line, and of what a daemon calls so, all that gets into a shell's line: anything
else there could be a command."""


def lease_id_argument(*, required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument LEASE_ID, which a command gets as a number."""
    return click.argument("lease_id", required=required, callback=_number_of, shell_complete=complete_lease_ids)


def _number_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    # All of it: the beginning of one, as a narrow `gpulease top` shows it, would be another lease's number.
    if not _LEASE_ID.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a lease id, which has 32 hexadecimal digits. Copy one from `gpulease leases`.",
            ctx,
            param,
        )
    return int(value, 16)


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
