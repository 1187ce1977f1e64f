"""A screen of the live view: exactly as many lines and cells as the terminal has, whatever the daemon reports."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final, TypeAlias

from gpulease.client.cli.top.columns import BY_TITLE, COLUMNS, GAP, bar_text, cell, fitting, offered, time_share
from gpulease.client.cli.top.sample import LeaseLine, Report, Sample, ScreenSamples, number, word
from gpulease.client.cli.top.view import (
    CONFIRMING_DIGITS,
    DEFAULT_REASON,
    MAX_EVERY_S,
    MIN_EVERY_S,
    Mode,
    View,
    visible,
)
from gpulease.client.console.tables import MISSING, fit, pad, seconds_text, shown, size_text, width_of
from gpulease.protocol.counts import counted

CARD_BAR: Final = 24
"""Width of a card's bar in cells."""

LATE_S: Final = 2.0
"""How late a sample may be before the screen says that it shows old figures, in seconds."""

HINTS: Final = "q quit  ? help  < > sort  R reverse  / filter  c card  k revoke  p pause  s pace"

ENDS_SOON: Final = 0.1
"""Share of a lease's time that is left when the lease changes its colour; tenants are warned at that time, too."""


class Style(Enum):
    """The look of a piece of a line; terminals without colours use bold and reverse only."""

    PLAIN = auto()
    HEAD = auto()
    CHOSEN = auto()
    GOOD = auto()
    WARNING = auto()
    BAD = auto()
    FAINT = auto()


Line: TypeAlias = list[tuple[str, Style]]


def frame(view: View, samples: ScreenSamples, address: str, now_s: float, width: int, height: int) -> list[Line]:
    """Return exactly `height` lines, none wider than `width` cells.

    If there is little room, leases are left out first, then cards, and the bottom line last.
    """
    is_help = view.mode == Mode.HELP
    body = _help() if is_help else _overview(view, samples, address, now_s, width, height - 1)
    # The last line is for a question or the hints, so the rest has one line less.
    lines = [_cut(line, width) for line in body[: max(0, height - 1)]]
    lines += [[] for _ in range(height - 1 - len(lines))]
    return [*lines, _bottom(view, samples, width)][:height] if height > 0 else []


def plain(view: View, samples: ScreenSamples, address: str, width: int) -> str:
    """Return the complete frame as text for a pipe, with all cards and all leases."""
    # Make the frame as high as its content, because a pipe has no height.
    sample = samples.sample
    height = 5 + (0 if sample is None else len(sample.cards) + len(sample.leases))
    lines = _overview(view, samples, address, sample.at_s if sample else 0.0, width, height)
    return "\n".join("".join(text for text, _ in _cut(line, width)).rstrip() for line in lines)


def _overview(view: View, samples: ScreenSamples, address: str, now_s: float, width: int, height: int) -> list[Line]:
    sample = samples.sample
    top = [_title(view, samples, address), *_warnings(view, samples, now_s)]
    if sample is None:
        return top
    # Count remaining times down between two samples.
    lines = [_aged(line, now_s - sample.at_s) for line in visible(view, samples)]
    lines_left = height - len(top)
    cards = [_card(card) for card in sample.cards if view.card is None or number(card, "index") == view.card]
    cards += _host(sample)
    # Show all cards if all leases fit below them; otherwise cards get half of the room, but none if that leaves fewer
    # than two leases.
    room = max(lines_left - 1 - len(lines), min(lines_left // 2, lines_left - 3))
    top += cards[: max(0, room)]
    return [*top, *_leases(view, lines, sample, width, max(0, height - len(top)))]


def _title(view: View, samples: ScreenSamples, address: str) -> Line:
    pace = "paused" if view.is_paused else f"every {view.every_s:g} s"
    line: Line = [("gpulease top", Style.HEAD), (f"  {shown(address)}  {pace}", Style.PLAIN)]
    # Show the filter, so that a filtered list is not mistaken for all leases.
    if view.card is not None:
        line.append((f"  GPU {view.card} only", Style.PLAIN))
    if view.pattern:
        line.append((f"  filter {shown(view.pattern)!r}", Style.PLAIN))
    if samples.sample is None and not samples.trouble:
        line.append(("  waiting for the daemon's first answer ...", Style.FAINT))
    return line


def _warnings(view: View, samples: ScreenSamples, now_s: float) -> list[Line]:
    lines: list[Line] = []
    sample = samples.sample
    # If figures are old, say how old.
    if samples.trouble:
        age = "" if sample is None else f"the table is {seconds_text(max(0.0, now_s - sample.at_s))} old: "
        lines.append([(f"{age}{shown(samples.trouble)}", Style.BAD)])
    elif sample is not None and not view.is_paused and now_s - sample.at_s > view.every_s + LATE_S:
        lines.append(
            [(f"the daemon does not answer; the table is {seconds_text(now_s - sample.at_s)} old", Style.WARNING)]
        )
    # Show the node's drain above the cards; a card's own drain is in the card's line.
    left_s = None if sample is None else sample.drain_left_s
    if left_s is not None:
        end_text = f"the remaining leases end in {seconds_text(left_s)}" if left_s else "all leases have been ended"
        lines.append([(f"DRAINED: no new leases, and {end_text}", Style.WARNING)])
    return lines


def _card(card: Report) -> Line:
    capacity, held_bytes, free = (number(card, key) for key in ("capacity_bytes", "held_bytes", "available_bytes"))
    index = number(card, "index")
    # An older daemon's report of a card may lack any figure.
    share = held_bytes / capacity if held_bytes is not None and capacity else None
    line: Line = [
        (f"{MISSING if index is None else f'{index:g}'} ", Style.HEAD),
        (bar_text(share, CARD_BAR), Style.GOOD),
        (f" {_bytes(held_bytes)} of {_bytes(capacity)} held, {_bytes(free)} free", Style.PLAIN),
    ]
    if (left_ms := number(card, "card_drain_left_ms")) is not None:
        time_left = f" ({seconds_text(left_ms / 1000)} left)" if left_ms else ""
        line.append((f", DRAINED{time_left}", Style.WARNING))
    if number(card, "fenced_bytes"):
        line.append((f", {_bytes(number(card, 'fenced_bytes'))} FENCED", Style.BAD))
    if (leases := number(card, "leases")) is not None:
        line.append((f", {counted(int(leases), 'lease')}", Style.PLAIN))
    if number(card, "warm_wanted"):
        line.append((f", {number(card, 'warm_contexts') or 0:g} of {number(card, 'warm_wanted'):g} warm", Style.PLAIN))
    if number(card, "parked_bytes"):
        line.append((f", {_bytes(number(card, 'parked_bytes'))} parked", Style.PLAIN))
    if wait_ms := number(card, "tenant_park_wait_ms"):
        # Another lease's need may park a session sooner than a tenant's request.
        need_ms = number(card, "park_wait_ms")
        for_need = f" (for need in {seconds_text(need_ms / 1000)})" if need_ms else ""
        line.append((f", next park in {seconds_text(wait_ms / 1000)}{for_need}", Style.WARNING))
    if card.get("exclusive") is True:
        line.append((", exclusive", Style.PLAIN))
    line.append((f"  {shown(word(card, 'name') or MISSING)}, {shown(word(card, 'driver') or MISSING)}", Style.FAINT))
    return line


def _host(sample: Sample) -> list[Line]:
    """One line about the node's host memory for parked sessions; no line if no session can be parked."""
    card = sample.cards[0] if sample.cards else {}
    host_bytes, limit_bytes = number(card, "park_host_bytes"), number(card, "park_host_limit_bytes")
    if host_bytes is None or not limit_bytes:
        return []
    return [
        [
            ("H ", Style.HEAD),
            (bar_text(host_bytes / limit_bytes, CARD_BAR), Style.GOOD),
            (f" {_bytes(host_bytes)} of {_bytes(limit_bytes)} of host memory held for parked sessions", Style.PLAIN),
        ]
    ]


def _bytes(size: float | None) -> str:
    return MISSING if size is None else size_text(int(size))


def _leases(view: View, lines: list[LeaseLine], sample: Sample, width: int, height: int) -> list[Line]:
    # The width decides which columns there are and how long the bar is, the remaining height how many rows.
    columns, widths, bar = fitting(width, offered(lines))
    if not sample.leases or not lines:
        return [[("No leases." if not sample.leases else "No lease matches the filter.", Style.FAINT)]][:height]
    head = " ".join(_titled(view, title, widths[title]) for title in [column.title for column in columns])
    rows = height - 1 if height > 1 else height
    ids = [line.lease_id for line in lines]
    at = ids.index(view.selected) if view.selected in ids else 0
    # Scroll so that the chosen lease is in the middle, as far as the list allows.
    first = max(0, min(at - rows // 2, len(lines) - rows))
    shown_rows: list[Line] = []
    for line in lines[first : first + rows]:
        text = " ".join(cell(column, line, widths[column.title]) for column in columns)
        style = Style.CHOSEN if line.lease_id == view.selected else Style.PLAIN
        row: Line = [(text, style)]
        if bar:
            share = time_share(line)
            soon = share is not None and share <= ENDS_SOON
            row.append((" " * GAP + bar_text(share, bar), Style.WARNING if soon else Style.GOOD))
        shown_rows.append(row)
    return [[(pad(head, width), Style.HEAD)], *shown_rows] if height > 1 else shown_rows


def _titled(view: View, title: str, width: int) -> str:
    # An arrow shows the direction in the sorted column.
    mark = ("^" if view.is_reversed else "v") if title == view.sort else ""
    return pad(title + mark, width, right=BY_TITLE[title].is_right)


def _aged(line: LeaseLine, age_s: float) -> LeaseLine:
    """Reduce the remaining time by the age of the sample."""
    return line if line.left_s is None else replace(line, left_s=max(0.0, line.left_s - max(0.0, age_s)))


def _bottom(view: View, samples: ScreenSamples, width: int) -> Line:
    begin = view.target[:CONFIRMING_DIGITS]
    questions = {
        Mode.FILTER: "Show only tenants whose names contain this text, or leases whose ids begin with it: ",
        Mode.EVERY: f"Seconds between samples, {MIN_EVERY_S:g} to {MAX_EVERY_S:g}: ",
        Mode.REASON: f"Revoke {_of_target(view, samples)}. Reason for its tenant [{DEFAULT_REASON}]: ",
        Mode.CONFIRM: f"Type {shown(begin)} to revoke {_of_target(view, samples)}, whatever it is doing: ",
    }
    # In the last line, a question has priority over everything else.
    if view.mode in questions:
        return _typed_line(questions[view.mode], shown(view.typed) + "_", width)
    if view.mode == Mode.HELP:
        return _cut([("Press any key to return", Style.FAINT)], width)
    if view.notice:
        return _cut([(shown(view.notice), Style.WARNING)], width)
    return _cut([(HINTS, Style.FAINT)], width)


def _typed_line(question: str, typed: str, width: int) -> Line:
    """Return a line with the typed text, or at least its end, after as much of the question as fits."""
    # Keep the end of the typed text, where the cursor is.
    while width_of(typed) > max(1, width // 2):
        typed = typed[1:]
    return _cut([(fit(question, max(0, width - width_of(typed))), Style.WARNING), (typed, Style.PLAIN)], width)


def _of_target(view: View, samples: ScreenSamples) -> str:
    leases: Sequence[Report] = () if samples.sample is None else samples.sample.leases
    lease = next((lease for lease in leases if word(lease, "lease_id") == view.target), None)
    tenant = "" if lease is None else f" of {shown(word(lease, 'tenant') or MISSING)}"
    return f"{shown(view.target[:8])}{tenant}"


def _help() -> list[Line]:
    keys = [
        ("q", "quit; so does Ctrl-C"),
        ("up down", "choose a lease; also Page Up, Page Down, Home, End"),
        ("< >", "sort by the next column to the left or to the right"),
        *((column.key, f"sort by {column.title}") for column in COLUMNS),
        ("R", "reverse the order"),
        ("/", "show only tenants whose names contain a text, or leases whose ids begin with it; Esc shows all"),
        ("c", "show only the leases of the next card, or of all cards"),
        ("space", "take a sample now"),
        ("p", "pause, resume"),
        ("s", "change the seconds between samples"),
        ("k", "revoke the chosen lease; asks for a reason and for the first digits of its id"),
    ]
    return [[(pad(key, 9), Style.HEAD), (text, Style.PLAIN)] for key, text in keys]


def _cut(line: Line, width: int) -> Line:
    cut_line: Line = []
    # Go piece by piece, because each has its own style.
    room = width
    for text, style in line:
        piece = fit(text, room)
        cut_line.append((piece, style))
        room -= width_of(piece)
        if piece != text:
            break
    return cut_line
