"""The state of the live view, and the effect of each key on it, without a terminal or a daemon."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final, TypeAlias

from gpulease.client.cli.top.columns import COLUMNS, arranged, offered
from gpulease.client.cli.top.sample import LeaseLine, ScreenSamples, lease_lines, number
from gpulease.client.console.reports import as_tree
from gpulease.client.console.tables import shown
from gpulease.protocol.fast_dataclass import dataclass

MIN_EVERY_S: Final = 0.1
"""Minimum number of seconds between samples. Stops the view from keeping the broker busy with reports."""

MAX_EVERY_S: Final = 3600.0

MAX_TYPED: Final = 200
"""Maximum number of characters of a typed line: a reason of this many four-byte characters still fits the request."""

CONFIRMING_DIGITS: Final = 4
"""Number of digits of a lease id that must be typed to confirm a revocation. Stops a user from confirming by habit, or
for the wrong lease."""

DEFAULT_REASON: Final = "revoked by the operator"

NO_CHOICE: Final = "Choose a lease first, with the arrow keys"


class Mode(Enum):
    """What keys mean at the moment: commands, or the text of an answer to a question."""

    BROWSE = auto()
    HELP = auto()
    FILTER = auto()
    EVERY = auto()
    REASON = auto()
    CONFIRM = auto()


@dataclass(frozen=True, slots=True)
class View:
    """The state of the live view.

    Attributes:
        every_s: Seconds between two samples.
        sort: The title of the column that orders the leases.
        pattern: Show only leases whose tenant's name contains this (ignoring case), or whose id begins with it.
        card: Show only leases on the card with this index; None for all.
        selected: The id of the selected lease; "" for none.
        typed: The line that is being typed.
        target: The lease to revoke: it stays the same even if the lines move.
        notice: A sentence to show until the next key.
    """

    every_s: float
    sort: str = "LEFT"
    is_reversed: bool = False
    pattern: str = ""
    card: int | None = None
    is_paused: bool = False
    selected: str = ""
    mode: Mode = Mode.BROWSE
    typed: str = ""
    target: str = ""
    reason: str = ""
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Quit:
    """Effect of a key: leave the view, and give the terminal back."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Effect of a key: take a sample now, not at the next interval."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Effect of a confirmed revocation: end this lease."""

    lease_id: str
    reason: str


Effect: TypeAlias = Quit | Refresh | Revoke
Pressed: TypeAlias = tuple[View, Effect | None]


def visible(view: View, samples: ScreenSamples) -> list[LeaseLine]:
    """Return the leases to show, in order, each followed by its regions."""
    lines = [] if samples.sample is None else lease_lines(samples.sample, samples.before)
    pattern = view.pattern.casefold()
    # Both filters must match; ids are in lower case, like the folded pattern.
    matches = [
        line
        for line in lines
        if (pattern in (line.tenant or "").casefold() or line.lease_id.startswith(pattern))
        and (view.card is None or line.card == view.card)
    ]
    ordered = arranged(matches, view.sort, is_reversed=view.is_reversed)
    return as_tree(ordered, lambda line: line.lease_id, lambda line: line.parent)


def press(view: View, key: str, samples: ScreenSamples) -> Pressed:
    """Apply a key: a character or a name ("up", "enter", "esc" ...). Returns the new view and an effect, if any."""
    # Any key removes the notice.
    view = replace(view, notice="")
    if view.mode == Mode.BROWSE:
        return _browse(view, key, samples)
    if view.mode == Mode.HELP:
        return replace(view, mode=Mode.BROWSE), None
    # From here on a line is being typed; Esc leaves it in every mode.
    if key == "esc":
        return _leave_mode(view, "The lease was not revoked" if view.mode in (Mode.REASON, Mode.CONFIRM) else ""), None
    if key == "backspace":
        return replace(view, typed=view.typed[:-1]), None
    # The meaning of an entered line depends on the question.
    if key == "enter":
        return _ENTERED[view.mode](view)
    if len(key) == 1 and key.isprintable() and len(view.typed) < MAX_TYPED:
        return replace(view, typed=view.typed + key), None
    return view, None


def _browse(view: View, key: str, samples: ScreenSamples) -> Pressed:
    if key in ("q", "esc"):
        # Esc only clears the filters: users press it when the view seems to be stuck, and it must not quit then.
        return (view, Quit()) if key == "q" else (replace(view, pattern="", card=None), None)
    if key == " ":
        return view, Refresh()
    # Moving the selection and sorting depend on the visible rows; other changes do not.
    if key in _MOVES:
        return _move_selection(view, key, visible(view, samples)), None
    if key in "<>" or key in _LETTERS:
        return _sort_by_key(view, key, samples), None
    change = _CHANGES.get(key)
    return (view, None) if change is None else (change(view, samples), Refresh() if key == "p" else None)


def _move_selection(view: View, key: str, lines: Sequence[LeaseLine]) -> View:
    if not lines:
        return view
    ids = [line.lease_id for line in lines]
    # The selected lease may have ended or be filtered out.
    at = ids.index(view.selected) if view.selected in ids else -1
    step = _MOVES[key]
    # Without a selection, the first step selects the top line.
    return replace(view, selected=ids[max(0, min(len(ids) - 1, at + step if at >= 0 else max(0, step - 1)))])


def _sort_by_key(view: View, key: str, samples: ScreenSamples) -> View:
    if key not in "<>":
        return replace(view, sort=_LETTERS[key])
    # Sort by the next column to the left or right among those that are shown.
    titles = [
        column.title
        for column in offered([] if samples.sample is None else lease_lines(samples.sample, samples.before))
    ]
    at = titles.index(view.sort) if view.sort in titles else 0
    return replace(view, sort=titles[max(0, min(len(titles) - 1, at + (1 if key == ">" else -1)))])


def _next_card(view: View, samples: ScreenSamples) -> View:
    indexes = (number(card, "index") for card in (() if samples.sample is None else samples.sample.cards))
    # Choose all cards, then each of them, and then all again. If the chosen card is gone, choose all.
    cards: list[int | None] = [None, *(int(index) for index in indexes if index is not None)]
    return replace(view, card=cards[(cards.index(view.card) + 1) % len(cards)] if view.card in cards else None)


def _begin_revoking(view: View, samples: ScreenSamples) -> View:
    # Only a lease that is on the screen can be revoked.
    if view.selected not in [line.lease_id for line in visible(view, samples)]:
        return replace(view, notice=NO_CHOICE)
    return replace(view, mode=Mode.REASON, target=view.selected, typed="")


def _leave_mode(view: View, notice: str = "") -> View:
    return replace(view, mode=Mode.BROWSE, typed="", target="", reason="", notice=notice)


def _enter_filter(view: View) -> Pressed:
    return replace(_leave_mode(view), pattern=view.typed.strip()), None


def _enter_interval(view: View) -> Pressed:
    try:
        every_s = float(view.typed)
    except ValueError:
        every_s = 0.0
    # A text that is not a number is refused like one out of bounds.
    if not MIN_EVERY_S <= every_s <= MAX_EVERY_S:
        return _leave_mode(
            view,
            f"the pace must be a number of seconds from {MIN_EVERY_S:g} to {MAX_EVERY_S:g}, not {shown(view.typed)!r}",
        ), None
    return replace(_leave_mode(view), every_s=every_s), Refresh()


def _enter_reason(view: View) -> Pressed:
    return replace(view, mode=Mode.CONFIRM, typed="", reason=view.typed.strip() or DEFAULT_REASON), None


def _enter_confirmation(view: View) -> Pressed:
    # Compare with the target, which stays the same even if the selection moves.
    if view.typed.strip().lower() != view.target[:CONFIRMING_DIGITS]:
        return _leave_mode(view, "The lease was not revoked: the typed digits do not begin its id"), None
    return _leave_mode(view, f"Revoking {view.target} ..."), Revoke(view.target, view.reason)


_ENTERED: Final[dict[Mode, Callable[[View], Pressed]]] = {
    Mode.FILTER: _enter_filter,
    Mode.EVERY: _enter_interval,
    Mode.REASON: _enter_reason,
    Mode.CONFIRM: _enter_confirmation,
}
_PAGE: Final = 10
_FAR: Final = 1 << 30
_MOVES: Final = {"up": -1, "down": 1, "pageup": -_PAGE, "pagedown": _PAGE, "home": -_FAR, "end": _FAR}
_LETTERS: Final = {column.key: column.title for column in COLUMNS}
_CHANGES: Final[dict[str, Callable[[View, ScreenSamples], View]]] = {
    "?": lambda view, _: replace(view, mode=Mode.HELP),
    "h": lambda view, _: replace(view, mode=Mode.HELP),
    "R": lambda view, _: replace(view, is_reversed=not view.is_reversed),
    "p": lambda view, _: replace(view, is_paused=not view.is_paused),
    "/": lambda view, _: replace(view, mode=Mode.FILTER, typed=view.pattern),
    "s": lambda view, _: replace(view, mode=Mode.EVERY, typed=""),
    "c": _next_card,
    "k": _begin_revoking,
}
