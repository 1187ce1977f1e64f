"""`gpulease info`, `leases`, `revoke` and `fence`: an operator's view of a node."""

import json
import re
import sys
from typing import Final

import click

from gpulease.client.cli.lease_ids import lease_id_argument
from gpulease.client.console.exit_status import EXIT_FAILED, if_interrupted
from gpulease.client.console.reports import REGION_MARK, Report, as_tree, cards_of, json_text, leases_of
from gpulease.client.console.tables import MISSING, fitted, output_width, seconds_text, shown, size_text, wrapped_text
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode, RevokeOutcome
from gpulease.protocol.counts import counted
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.limits import MAX_TEXT_BYTES
from gpulease.protocol.messages import CapabilityRevoke, Empty, FenceClear, LeaseMove, LeaseRef, LeaseRevoke

_NONCE: Final = re.compile("[0-9a-f]{32}")
_table_or_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_words_or_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")


@click.command()
@click.option("--sandbox", "shows_sandbox", is_flag=True, help="Show each measure of the workers' sandbox.")
@_table_or_json
def info(shows_sandbox: bool, as_json: bool) -> None:
    """Show the cards: memory to lease, free memory, fenced memory."""
    inventory = ask(Opcode.GET_INVENTORY, Empty())
    if as_json:
        click.echo(json_text(inventory.details))
        return
    cards = cards_of(inventory)
    width = output_width()
    # The node's drain concerns every card, so each reports the same time.
    left_ms = next((card.get("drain_left_ms") for card in cards), None)
    if left_ms is not None:
        end_text = (
            f"the remaining leases end in {seconds_text(left_ms / 1000)}" if left_ms else "all leases have been ended"
        )
        click.echo(wrapped_text(f"The node is drained: it grants no leases, and {end_text}.", width))
    click.echo(_card_table(cards, width))
    # Below the table, print a sentence for each card that needs an explanation.
    for card in cards:
        for sentence in filter(None, (_drained(card), _taken_by_others(card), _fenced(card), _paced(card))):
            click.echo(wrapped_text(sentence, width))
    # All workers of a node have the same sandbox; a daemon older than the sandbox reports none.
    sandbox = cards[0].get("sandbox") if cards else None
    if sandbox and (text := _sandbox_text(sandbox, width, is_whole=shows_sandbox)):
        click.echo("\n" + text)


def _drained(card: Report) -> str:
    left_ms = card.get("card_drain_left_ms")
    if left_ms is None:
        return ""
    end_text = (
        f"its remaining leases end in {seconds_text(left_ms / 1000)}"
        if left_ms
        else "all of its leases have been ended"
    )
    return f"Card {card['index']} is drained: it grants no leases, and {end_text}."


def _paced(card: Report) -> str:
    """Describe when a card's next park may begin; "" if at once, or if the daemon is too old to report it."""
    need_ms, tenant_ms = card.get("park_wait_ms") or 0, card.get("tenant_park_wait_ms") or 0
    if not tenant_ms:
        return ""
    need = f"in {seconds_text(need_ms / 1000)}" if need_ms else "at once"
    return (
        f"GPU {card['index']} has reached parks_per_minute: tenants' requests and idleness may park a session in "
        f"{seconds_text(tenant_ms / 1000)}, other leases' need and operators {need}."
    )


def _card_table(cards: list[Report], width: int | None) -> str:
    head = ["GPU", "card", "name", "driver", "capacity", "free", "fenced", "leases", "warm", "exclusive"]
    rows = [
        [
            str(card["index"]),
            card["uuid"],
            card["name"],
            card["driver"],
            size_text(card["capacity_bytes"]),
            size_text(card["available_bytes"]),
            size_text(card["fenced_bytes"]),
            str(card["leases"]),
            _warm(card),
            "yes" if card["exclusive"] else "no",
        ]
        for card in cards
    ]
    # Columns that a narrow terminal drops first.
    droppable = ("exclusive", "warm", "driver")
    return fitted(head, rows, width, title_column=head.index("card"), droppable=droppable, texts=("card", "name"))


def _sandbox_text(sandbox: list[Report], width: int | None, *, is_whole: bool) -> str:
    """Describe every measure, or only those that are off; "" if none is off."""
    # Show all measures on request, otherwise only those that an operator should know about.
    if is_whole:
        measures = [[finding["measure"], "on" if finding["on"] else "OFF", finding["detail"]] for finding in sandbox]
        return fitted(["workers' sandbox", "", "extent, or why it is off"], measures, width, is_text_last=True)
    off = [finding["measure"] for finding in sandbox if not finding["on"]]
    if not off:
        return ""
    measures_off = f"{len(off)} of {len(sandbox)} measures of the workers' sandbox are OFF: {', '.join(off)}"
    return wrapped_text(f"{measures_off}. `gpulease info --sandbox` shows why.", width)


def _taken_by_others(card: Report) -> str:
    """Describe memory of the card that others have taken since the daemon measured it; "" if there is none."""
    holders = (("unowned_bytes", "the driver"), ("outside_bytes", "programs outside gpulease"))
    # Show only the members that exist: older daemons report neither.
    shares = [f"{size_text(card[name])} by {holder}" for name, holder in holders if card.get(name)]
    return (
        f"GPU {card['index']}: since the daemon started, memory was taken by others: {' and '.join(shares)}."
        if shares
        else ""
    )


def _fenced(card: Report) -> str:
    """Describe memory of the card that is not granted because it is fenced; "" if there is none."""
    if not card["fenced_bytes"]:
        return ""
    return (
        f"GPU {card['index']}: {size_text(card['fenced_bytes'])} could not be proved free, and can't be "
        "granted. If you are sure that no program uses this memory: `gpulease fence clear "
        f"{card['index']}`."
    )


def _warm(card: Report) -> str:
    """Describe the pool: contexts that wait for a lease, and the memory that they hold."""
    # A node without a pool has nothing to describe.
    if not card.get("warm_wanted") and not card.get("warm_bytes"):
        return "0"
    ready, wanted, held_bytes = (card.get(f"warm_{name}") or 0 for name in ("contexts", "wanted", "bytes"))
    reused = f", {card['recycled_contexts']} reused" if card.get("recycled_contexts") else ""
    return f"{ready} of {wanted} ready{reused}, {size_text(held_bytes)}"


@click.command()
@click.option("--tenant", metavar="NAME", help="List only the leases of this tenant.")
@_table_or_json
def leases(tenant: str | None, as_json: bool) -> None:
    """List leases, each with its regions: your own, or all of them if you are an operator."""
    report = ask(Opcode.LEASE_LIST_ACTIVE, Empty()).report
    # The daemon lists what this user may see; the option narrows it further.
    if tenant is not None:
        report = [lease for lease in leases_of(report) if lease["tenant"] == tenant]
    if as_json:
        click.echo(json_text(report))
        return
    if not report:
        click.echo("No leases." if tenant is None else shown(f"No leases of {tenant}."))
        return
    # List each region directly after its lease.
    listed = as_tree(leases_of(report), lambda lease: str(lease["lease_id"]), lambda lease: lease.get("parent"))
    cards = cards_of(ask(Opcode.GET_INVENTORY, Empty()))
    gpus = {card["uuid"]: str(card["index"]) for card in cards}
    rows = [_row(lease, gpus) for lease in listed]
    head = ["lease", "tenant", "GPU", "state", "slice", "used", "GPU time", "launches", "copies", "age", "left"]
    droppable = ("copies", "launches", "age", "GPU", "GPU time")
    click.echo(fitted(head, rows, output_width(), droppable=droppable, texts=("lease", "tenant")))
    # List the leases on workers that still run the code of an earlier daemon.
    if earlier := [_earlier(lease) for lease in listed if lease.get("earlier_version")]:
        head = ["lease", "version of its worker", "why it stays there"]
        click.echo("\n" + fitted(head, earlier, output_width(), texts=("lease",), is_text_last=True))
        click.echo(wrapped_text("`gpulease upgrade-workers` moves them to workers of this version.", output_width()))
    for sentence in filter(None, map(_paced, cards)):
        click.echo("\n" + wrapped_text(sentence, output_width()))
    if warm_only := [(lease["lease_id"], reason) for lease in listed if (reason := _warm_only(lease))]:
        head = ["lease", "why it can only be parked warm"]
        click.echo("\n" + fitted(head, warm_only, output_width(), texts=("lease",), is_text_last=True))
    # List the holders of buffers, for sessions that several programs use.
    if holders_by_lease := [(lease["lease_id"], _holders(lease)) for lease in listed if _holders(lease)]:
        click.echo(
            "\n"
            + fitted(
                ["lease", "holders of buffers"], holders_by_lease, output_width(), texts=("lease",), is_text_last=True
            )
        )
    if any(lease.get("unheld_bytes") for lease in listed):
        click.echo(
            wrapped_text(
                "`gpulease free --memory LEASE` frees what no connection holds, and what is kept by name.",
                output_width(),
            )
        )


def _row(lease: Report, gpus: dict[str, str]) -> list[str]:
    used, launches, copies, age_ms = (lease.get(key) for key in ("allocated_bytes", "launches", "copies", "age_ms"))
    gpu_s = lease.get("gpu_seconds")
    return [
        (REGION_MARK if lease.get("parent") else "") + lease["lease_id"],
        lease["tenant"],
        gpus.get(lease.get("card_uuid") or "", MISSING),
        _state(lease),
        size_text(lease["size_bytes"]),
        MISSING if used is None else size_text(used),
        MISSING if gpu_s is None else seconds_text(gpu_s),
        MISSING if launches is None else str(launches),
        MISSING if copies is None else str(copies),
        MISSING if age_ms is None else seconds_text(age_ms / 1000),
        seconds_text(lease["remaining_ms"] / 1000),
    ]


def _earlier(lease: Report) -> list[str]:
    park = lease.get("park")
    reason = "its lease is not parkable" if park is None else park.get("stays_here") or _warm_only(lease) or MISSING
    return [lease["lease_id"], lease["earlier_version"], reason]


def _warm_only(lease: Report) -> str:
    """Return why a lease's session can only be parked warm; "" if it can be parked cold, or is not parkable."""
    park = lease.get("park") or {}
    return str(park.get("warm_only", park.get("stays_here")) or "")


def _holders(lease: Report) -> str:
    """Describe who holds the buffers of a lease's session; "" for none, or if the daemon is too old to report it."""
    connections = lease.get("connections") or []
    # Name a program on this host by its process, a remote one by its number.
    holders = [
        (
            f"pid {connection['pid']}" if connection["pid"] else f"remote {connection['number']}",
            connection["held_bytes"],
        )
        for connection in connections
    ]
    holders += [("kept by name", lease.get("kept_memory_bytes") or 0), ("no session", lease.get("unheld_bytes") or 0)]
    return ", ".join(f"{holder}: {size_text(size_bytes)}" for holder, size_bytes in holders if size_bytes)


def _state(lease: Report) -> str:
    """Describe a lease's state, with the cause that ends it or soon will."""
    # If the lease is ending, only the cause matters.
    if lease.get("cause") is not None:
        return f"{lease['state']} ({lease['cause']})"
    left_ms = lease.get("orphaned_in_ms")
    park = lease.get("park") or {}
    if left_ms is None and park.get("phase") not in (None, "resident"):
        return f"{lease['state']} ({_park_text(park)})"
    if left_ms is not None:
        return f"{lease['state']} (unconnected, ends in {seconds_text(left_ms / 1000)})"
    return f"{lease['state']} (warm only)" if _warm_only(lease) else str(lease["state"])


def _park_text(park: Report) -> str:
    """Describe the state of a session that is not on its card."""
    since_ms = park.get("parked_for_ms")
    words = [f"{park['phase']}{'' if since_ms is None else ' ' + seconds_text(since_ms / 1000)}"]
    if park.get("depth") not in (None, "warm"):
        words.append(str(park["depth"]))
    if _warm_only({"park": park}):
        words.append("warm only")
    return ", ".join(words)


@click.command()
@lease_id_argument()
@click.option(
    "--reason",
    default="revoked by the operator",
    callback=lambda ctx, param, text: _reason(text),
    help="The reason, which is reported to the lease's tenant.",
)
@click.option(
    "--token",
    "nonce",
    callback=lambda ctx, param, text: None if text is None else _nonce_number(text),
    help="End only the token with this nonce; the audit log's `issue` records contain the nonces.",
)
@_words_or_json
def revoke(lease_id: LeaseId, reason: str, nonce: int | None, as_json: bool) -> None:
    """End a lease or a region at once, whatever it is doing. The exit status is 0 only if its memory is proved free."""
    # A token's end needs no proof.
    if nonce is not None:
        _revoke_token(lease_id, nonce, as_json)
        return
    note = f"The end of lease {lease_id} may have begun, and then continues without this command: see gpulease leases."
    with if_interrupted(lambda: note):
        outcome = ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, reason)).outcome
    if as_json:
        click.echo(json.dumps({"lease_id": str(lease_id), "outcome": outcome_word(outcome)}))
    else:
        click.echo(shown(outcome_text(lease_id, outcome)), err=outcome != RevokeOutcome.TORN_DOWN)
    # Any other outcome means that the memory is not proved free, which a script must notice.
    if outcome != RevokeOutcome.TORN_DOWN:
        sys.exit(EXIT_FAILED)


@click.command()
@lease_id_argument()
@click.option("--cold", is_flag=True, help="End the session's process as well, so that it uses no memory of the card.")
@_words_or_json
def park(lease_id: LeaseId, cold: bool, as_json: bool) -> None:
    """Move the memory of a parkable lease's session to the host, so that other leases can use the card.

    The session's next operation brings it back. The command returns when the card shows that the bytes are free or,
    with --cold, when the daemon begins to end the session's process.
    """
    note = f"The park of lease {lease_id} may have begun, and then ends without this command: see gpulease leases."
    with if_interrupted(lambda: note):
        if cold:
            parked = ask(Opcode.LEASE_MOVE, LeaseMove(lease_id, None))
        else:
            parked = ask(Opcode.LEASE_PARK, LeaseRef(lease_id))
    if as_json:
        click.echo(json.dumps({"lease_id": str(lease_id), "moved_bytes": parked.moved_bytes}))
    else:
        click.echo(shown(f"Lease {lease_id} is parked: {size_text(parked.moved_bytes)} are in the host's memory."))


def _revoke_token(lease_id: LeaseId, nonce: int, as_json: bool) -> None:
    with if_interrupted(lambda: f"Token {nonce:032x} may have been revoked. Repeat the command to be sure."):
        ask(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(lease_id, nonce, b""))
    if as_json:
        click.echo(json.dumps({"lease_id": str(lease_id), "token": f"{nonce:032x}", "outcome": "revoked"}))
    else:
        click.echo(f"Token {nonce:032x} of lease {lease_id} is no longer valid, if it existed.")


def outcome_word(outcome: int) -> str:
    """A revocation's outcome for programs; a newer daemon's may be a number."""
    # Look it up by number, because a newer daemon may send one that has no name here.
    words = {RevokeOutcome.TORN_DOWN: "torndown", RevokeOutcome.FENCED: "fenced", RevokeOutcome.NOT_FOUND: "notfound"}
    return {int(code): word for code, word in words.items()}.get(int(outcome), str(outcome))


def outcome_text(lease_id: LeaseId, outcome: int) -> str:
    """A revocation's outcome as a sentence about the lease and its memory."""
    match outcome:
        case RevokeOutcome.TORN_DOWN:
            return f"Lease {lease_id} has ended, and its memory is free."
        case RevokeOutcome.FENCED:
            reason = "could not be proved free; it is fenced, unless an operator has cleared the fence"
            return f"Lease {lease_id} has ended, but its memory {reason}."
        case _:
            return f"No such lease: {lease_id}."


def _sendable(text: str) -> str:
    """Return the text if a request can carry it. Raises BadParameter."""
    size_bytes = len(text.encode())
    if size_bytes > MAX_TEXT_BYTES:
        raise click.BadParameter(f"it has {size_bytes} bytes; at most {MAX_TEXT_BYTES} are allowed.")
    return text


def _reason(text: str) -> str:
    """Return the reason if it is not blank. Raises BadParameter."""
    if not text.strip():
        raise click.BadParameter("it is blank; give a reason, or leave --reason out.")
    return _sendable(text)


def _nonce_number(text: str) -> int:
    """Parse a token's nonce, 32 hex digits. Raises BadParameter."""
    if not _NONCE.fullmatch(text):
        raise click.BadParameter(
            f"it must be a token's nonce, not {text!r}. Copy one from the output of `gpulease audit show "
            "--kind issue FOLDER`."
        )
    return int(text, 16)


@click.group()
def fence() -> None:
    """Manage memory that could not be proved free."""


@fence.command("clear")
@click.argument("card", required=False, callback=lambda ctx, param, text: None if text is None else _sendable(text))
@_words_or_json
def fence_clear(card: str | None, as_json: bool) -> None:
    """Allow fenced memory to be granted again. First make sure that it is free.

    CARD is a UUID or an index; by default, every card.
    """
    with if_interrupted(lambda: "The fenced memory may have been cleared: see gpulease info."):
        count = ask(Opcode.FENCE_CLEAR, FenceClear(card)).count
    if as_json:
        click.echo(json.dumps({"cleared": count}))
    else:
        click.echo(f"{counted(count, 'fenced slice')} can be leased again." if count else "No slice was fenced.")
