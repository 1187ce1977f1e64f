"""The command `gpulease audit` (`python -m gpulease.daemon.record.audit`), which reads audit logs of any host."""

import sys
from pathlib import Path
from typing import Any, Final

import click

from gpulease.daemon.record.audit.log_reader import (
    CannotRead,
    LogSource,
    days_csv,
    days_map,
    days_table,
    find_log,
    line_of,
    usage_map,
    usage_table,
)
from gpulease.daemon.record.audit.records import AuditRecord, ChainEnd, RecordKind, canonical_bytes
from gpulease.daemon.record.audit.usage import UsageSum
from gpulease.daemon.record.audit.verification import Verdict, Verifier
from gpulease.protocol.counts import counted
from gpulease.protocol.json_text import indented_json

EXIT_NOT_WHOLE: Final = 1
EXIT_CANNOT_READ: Final = 66
"""EX_NOINPUT of sysexits(3)."""

LEASE_ID_DIGITS: Final = 32

_PATH: Final = click.Path(path_type=Path, readable=False)
"""The type of paths. click does not check that they can be read, because an unreadable log has its own exit status."""

_paths = click.argument("paths", nargs=-1, required=True, metavar="FOLDER | FILE...", type=_PATH)
_head_file = click.option(
    "--head-file",
    type=_PATH,
    help="The log's head; by default, head.json next to the log, if it exists.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CannotRead as error:
            click.echo(f"gpulease audit: {error}", err=True)
            sys.exit(EXIT_CANNOT_READ)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Read audit logs: verify them, show their records, add up each tenant's usage.

    `gpulease audit recompute`, a command of the client, computes a decoder's output again and compares.
    """


@main.command()
@_paths
@_head_file
@click.option("--head", metavar="SEQ:HASH", help="A head that you kept elsewhere; it takes precedence over any file.")
@_json
def verify(paths: tuple[Path, ...], head_file: Path | None, head: str | None, as_json: bool) -> None:
    """Find every edited, missing or reordered record. The exit status is 0 only if there is none."""
    # Prefer the head in --head to the head's file: the operator kept it where the log's writer can't reach it.
    source = find_log(paths, head_file)
    chain_end = _link(head) if head else (None if source.head is None else source.head.end)
    verifier = Verifier(chain_end)
    for file, offset, line in source.lines():
        verifier.take(file, offset, line)
    verdict = verifier.finish()
    # Without a head, a log that was cut at the end looks whole.
    if chain_end is None:
        verdict.notes.append("no head is known, so missing records at the end would not be detected")
    click.echo(indented_json(_verdict_map(verdict)) if as_json else _verdict_text(verdict))
    sys.exit(0 if verdict.is_whole else EXIT_NOT_WHOLE)


@main.command()
@_paths
@click.option(
    "--lease", metavar="ID", help="Only the records of this lease, given by its id or the first digits of it."
)
@click.option("--tenant", help="Only this tenant's records.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in RecordKind]),
    help="Only records of this kind; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the records' lines as they are.")
def show(paths: tuple[Path, ...], lease: str | None, tenant: str | None, kinds: tuple[str, ...], as_json: bool) -> None:
    """Show records, oldest first. The exit status is 0 only if every line of the files is a record."""
    # A first pass finds the full id, so that a prefix that two leases' ids share is an error.
    lease_id = None if lease is None else _lease_named(find_log(paths), lease.lower())

    def is_wanted(record: AuditRecord) -> bool:
        # An operator's record has `by` and no tenant.
        people = (record.data.get("tenant"), record.data.get("by"))
        return (
            (not kinds or record.kind in kinds)
            and (lease_id is None or record.data.get("lease") == lease_id)
            and (tenant is None or tenant in people)
        )

    text = _json_line if as_json else line_of
    verifier = Verifier()
    for record in find_log(paths).records(verifier):
        if is_wanted(record):
            click.echo(text(record))
    # The files may be only part of the log, so missing records are not an error here.
    if unreadable := verifier.finish().unreadable:
        click.echo(
            f"gpulease audit: {counted(unreadable, 'place has', 'places have')} bytes that are not a record; "
            "see `gpulease audit verify`",
            err=True,
        )
        sys.exit(EXIT_NOT_WHOLE)


@main.command()
@_paths
@_head_file
@_json
@click.option("--by-day", is_flag=True, help="Sum up by day (UTC), tenant and card.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the sums by day, tenant and card as CSV.")
def usage(paths: tuple[Path, ...], head_file: Path | None, as_json: bool, by_day: bool, as_csv: bool) -> None:
    """Sum up lease seconds, byte seconds and GPU seconds by tenant, from the records.

    The exit status is 0 only if the log is whole.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv can't be given together")
    source = find_log(paths, head_file)
    verifier = Verifier(None if source.head is None else source.head.end)
    # Add up and verify in one pass, and print the sums even if the chain is broken.
    total = UsageSum()
    for record in source.records(verifier):
        total.take(record)
    tenants = total.finish(source.head)
    if as_csv:
        click.echo(days_csv(total.days), nl=False)
    elif by_day:
        click.echo(indented_json(days_map(total.days)) if as_json else days_table(total.days))
    else:
        click.echo(indented_json(usage_map(tenants)) if as_json else usage_table(tenants))
    if not verifier.finish().is_whole:
        click.echo(
            "gpulease audit: the log is NOT whole, so this usage may be wrong; see `gpulease audit verify`", err=True
        )
        sys.exit(EXIT_NOT_WHOLE)


@main.command()
@_paths
@_head_file
def head(paths: tuple[Path, ...], head_file: Path | None) -> None:
    """Print the head as SEQ:HASH. Keep it where a writer of the log can't reach it."""
    source = find_log(paths, head_file)
    if source.head is None:
        raise CannotRead("the log has no head")
    click.echo(f"{source.head.end.seq}:{source.head.end.hash}")


def _lease_named(source: LogSource, digits: str) -> str:
    """Return the only lease id in a log with these first digits. Raises UsageError if there is none, or several."""
    if len(digits) == LEASE_ID_DIGITS:
        return digits
    leases = (record.data.get("lease") for record in source.records())
    matches = sorted({lease for lease in leases if isinstance(lease, str) and lease.startswith(digits)})
    if len(matches) != 1:
        raise click.UsageError(
            f"{len(matches)} leases in the log begin with {digits}: give all {LEASE_ID_DIGITS} digits"
        )
    return matches[0]


def _json_line(record: AuditRecord) -> str:
    return canonical_bytes({name: getattr(record, name) for name in AuditRecord.__slots__}).decode()


def _link(text: str) -> ChainEnd:
    seq, colon, digest = text.partition(":")
    if not colon or not seq.isdecimal() or len(digest) != len(ChainEnd().hash):
        raise click.BadParameter(f"{text!r} is not SEQ:HASH", param_hint="--head")
    return ChainEnd(int(seq), digest.lower())


def _verdict_text(verdict: Verdict) -> str:
    lines = [str(finding) for finding in verdict.findings]
    if verdict.omitted:
        lines.append(f"and {verdict.omitted} more")
    lines += [f"note: {note}" for note in verdict.notes]
    state_text = "whole" if verdict.is_whole else "NOT whole"
    end = f"{verdict.end.seq}:{verdict.end.hash}"
    return "\n".join([*lines, f"The log is {state_text}: {counted(verdict.records, 'record')}, the last is {end}."])


def _verdict_map(verdict: Verdict) -> dict[str, Any]:
    findings = [
        {"file": item.file, "offset_bytes": item.offset_bytes, "seq": item.seq, "problem": item.problem}
        for item in verdict.findings
    ]
    return {
        "whole": verdict.is_whole,
        "records": verdict.records,
        "end": {"seq": verdict.end.seq, "hash": verdict.end.hash},
        "findings": findings,
        "omitted": verdict.omitted,
        "notes": verdict.notes,
    }


if __name__ == "__main__":
    main(prog_name="gpulease audit")
