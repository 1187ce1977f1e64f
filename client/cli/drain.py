"""`gpulease drain`: empty a node or one of its cards, and optionally wait until it is empty."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from gpulease.client.cli.card_moves import card_uuid_of, move_sessions
from gpulease.client.console.exit_status import EXIT_FAILED, if_interrupted
from gpulease.client.console.reports import Report, cards_of, leases_of
from gpulease.client.console.tables import seconds_text, shown
from gpulease.client.core.lease_request import milliseconds
from gpulease.client.errors import Disconnected, InvalidRequest
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.counts import counted
from gpulease.protocol.messages import CardDrain, Drain, DrainStatus, Empty

POLL_S: Final = 0.2
"""Seconds between two queries for the remaining leases."""

DAEMON_RESTART_S: Final = 30.0
"""How long to wait for a daemon that is restarting, in seconds."""

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def milliseconds_of(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a time span as people type it: "90", "90s", "10m", "1.5h". Raises BadParameter."""
    # Digits and a point, then a unit in letters; without a unit, seconds.
    number = value.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        return milliseconds(float(number) * _UNITS[value[len(number) :] or "s"], "a time", least_ms=0)
    except InvalidRequest as error:
        raise click.BadParameter(f"{error}.", ctx, param) from None
    except (ValueError, KeyError):
        raise click.BadParameter(f"the time must be like 30s, 10m or 1.5h, not {value!r}.", ctx, param) from None


def span_option(option: str, variable: str, default: str, text: str) -> Callable[[Command], Command]:
    """An option whose value is a time span, passed on in milliseconds; `text` is its help."""
    return click.option(option, variable, callback=milliseconds_of, default=default, show_default=True, help=text)


within_option = span_option(
    "--within", "within_ms", "10m", "The time after which all remaining leases are ended: 30s, 10m."
)
cancel_option = click.option("--cancel", is_flag=True, help="End the drain, so that leases are granted again.")


@click.command()
@click.option("--device", help="Drain only this card, given by its UUID or index.")
@within_option
@click.option(
    "--move", "moves", is_flag=True, help="With --device: move the sessions of parkable leases to other cards at once."
)
@click.option("--wait", is_flag=True, help="Return only once no lease is left.")
@cancel_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def drain(
    ctx: click.Context, device: str | None, within_ms: int, moves: bool, wait: bool, cancel: bool, as_json: bool
) -> None:
    """Empty the node: refuse new leases, warn tenants, and end the remaining leases by a deadline.

    With --device, only that card is emptied, and waiting requests are granted on other cards. --move then moves the
    sessions of parkable leases to other cards, one after the other, lists each lease that stays, with the reason, and
    exits with 1 if any stays.

    If the command is repeated, the new deadline applies. The node or card stays drained until --cancel or, without
    `state`, until the daemon restarts. With --wait, the exit status is 1 if memory of a lease could not be proved free,
    or if the drain was cancelled.
    """
    # --cancel ends the drain, so refuse a deadline, moves and waiting with it.
    if cancel and (wait or moves or ctx.get_parameter_source("within_ms") == ParameterSource.COMMANDLINE):
        raise click.UsageError("--cancel can't be combined with --within, --move or --wait")
    if moves and (device is None or wait):
        raise click.UsageError("--move needs --device" if device is None else "--move and --wait can't be combined")
    uuid = None if device is None else card_uuid_of(device, "--device")
    status = None
    with if_interrupted(lambda: _after_interrupt(uuid, is_set=status is not None)):
        status = _set_drain(uuid, None if cancel else within_ms)
        if not (as_json and (wait or moves)):
            _show(uuid, status, [], as_json)
        if moves and uuid is not None:
            # The drained card grants no leases, so no other lease takes the place of a moved one.
            move_sessions(uuid, as_json=as_json)
        elif wait:
            _wait(uuid, status, as_json)


def _after_interrupt(uuid: str | None, *, is_set: bool) -> str:
    """Return the text about what remains after an interrupt of the command.

    `is_set`: Whether the daemon has answered the request.
    """
    subject, option = ("The node", "") if uuid is None else (f"Card {uuid}", f" --device {uuid}")
    if not is_set:
        return "The daemon may have received the request: see gpulease info."
    return f"{subject} stays drained: gpulease drain{option} --cancel ends that."


def _set_drain(uuid: str | None, within_ms: int | None) -> DrainStatus:
    """Drain the node, or the card with that UUID; end that drain if `within_ms` is None."""
    status: DrainStatus
    if uuid is not None:
        status = ask(Opcode.CARD_DRAIN, CardDrain(uuid, within_ms))
    else:
        status = ask(Opcode.DRAIN_CANCEL, Empty()) if within_ms is None else ask(Opcode.DRAIN, Drain(within_ms))
    return status


def _wait(uuid: str | None, status: DrainStatus, as_json: bool) -> None:
    """Wait until no lease is left on the node, or on the card. The drain itself does not need this command."""
    # Fenced leases never end by themselves, so they are only reported at the end.
    while _remaining_leases(uuid, with_fenced=False):
        _check_drained(uuid)
        time.sleep(POLL_S)
    _check_drained(uuid)
    # Nothing is left, except for memory that could not be proved free.
    fenced = _remaining_leases(uuid, with_fenced=True)
    if as_json:
        _show(uuid, status, fenced, as_json)
    elif fenced:
        click.echo(
            shown(f"No lease is left, but memory of {counted(len(fenced), 'lease')} is fenced: {', '.join(fenced)}."),
            err=True,
        )
    else:
        click.echo("No lease is left.")
    if fenced:
        sys.exit(EXIT_FAILED)


def _check_drained(uuid: str | None) -> None:
    """Raise InvalidRequest if the node or card is no longer drained, so that new leases may be granted."""
    cards = cards_of(_ask_with_retries(Opcode.GET_INVENTORY))
    # Every card reports the node's drain, and its own.
    key, subject = ("drain_left_ms", "node") if uuid is None else ("card_drain_left_ms", "card")
    if all(card.get(key) is None for card in cards if uuid in (None, card["uuid"])):
        raise InvalidRequest(
            f"the {subject} is no longer being drained: the drain was cancelled, or the daemon was "
            "restarted without `state`",
            "Drain it again",
        )


def _ask_with_retries(op: Opcode) -> Any:
    """Send a request, and repeat it while the daemon restarts: with `state`, the next daemon continues the drain.

    Raises Disconnected after DAEMON_RESTART_S.
    """
    deadline_s = time.monotonic() + DAEMON_RESTART_S
    while True:
        try:
            return ask(op, Empty())
        except Disconnected:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)


def _remaining_leases(uuid: str | None, *, with_fenced: bool) -> list[str]:
    leases: list[Report] = leases_of(_ask_with_retries(Opcode.LEASE_LIST_ACTIVE).report)
    leases = [lease for lease in leases if uuid in (None, lease["card_uuid"])]
    return [lease["lease_id"] for lease in leases if with_fenced or lease["state"] != "fenced"]


def _show(uuid: str | None, status: DrainStatus, fenced: list[str], as_json: bool) -> None:
    if as_json:
        left_s = None if status.left_ms is None else status.left_ms / 1000
        report = {"draining": left_s is not None, "left_s": left_s, "leases": status.leases, "fenced": fenced}
        click.echo(json.dumps(report if uuid is None else report | {"card_uuid": uuid}))
    else:
        click.echo(shown(drain_text("The node" if uuid is None else f"Card {uuid}", status)))


def drain_text(node: str, status: DrainStatus) -> str:
    """Describe a node's drain in one or two sentences that begin with `node`."""
    if status.left_ms is None:
        return f"{node} is not drained: it grants leases."
    if not status.leases:
        return f"{node} grants no more leases, and none is left."
    lease_count = counted(status.leases, "lease is", "leases are")
    return (
        f"{node} grants no more leases. {lease_count} left, and will end within {seconds_text(status.left_ms / 1000)}."
    )
