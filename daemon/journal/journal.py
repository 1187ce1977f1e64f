"""The broker's side of the journal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpulease.daemon.core import (
    Card,
    Denial,
    Effect,
    Event,
    KeptCard,
    KeptLease,
    LeaseTable,
    Outcome,
    Past,
)

OnOutcome = Callable[[Outcome], None]


class JournalBroken(Exception):
    """The journal can't be used; the message is a sentence for the operator.

    Attributes:
        hint: What to do, and what that costs.
        status: The exit status of a daemon that can't start for it, one of sysexits(3).
    """

    def __init__(self, message: str, hint: str, status: int) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status


class Journal:
    """Of a daemon that keeps none: forgets everything, holds nothing back.

    Attributes:
        kept: The leases that an earlier daemon left, for `LeaseRestored`.
        past: What else it left, for the lease table.
        spent: Tokens that were used: lease, nonce, and until when no token of that nonce can be valid.
        cards: What was measured of the cards in this boot of the host, by uuid.
    """

    kept: tuple[KeptLease, ...] = ()
    past: Past = Past()
    spent: tuple[tuple[int, bytes, int], ...] = ()
    cards: Mapping[str, KeptCard] = {}

    def observe(self, table: LeaseTable, pid_of: Callable[[int], int], post: Callable[[Event], None]) -> None:
        """Which table is kept, which process a lease's worker is, and where events go."""

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        """What an event brought about; told before any of it is carried out."""

    def answer(self, outcome: Outcome, on_outcome: OnOutcome) -> None:
        """Tell an outcome once all before it is on the disk; a `Denied` in its place if it can't be brought there."""
        on_outcome(outcome)

    def denial(self) -> Denial | None:
        """Why nothing can be granted or renewed at present, if it is for want of the journal."""
        return None

    def spend(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """Write down that a token was used, then say whether that is on the disk."""
        on_done(True)

    def remember_cards(self, cards: Sequence[Card]) -> None:
        """What was measured of the cards, for the next daemon of this boot."""

    async def stop(self) -> None:
        """Write what is left."""


class FileJournal(Journal):
    """Of a daemon that keeps one."""


def open_journal(folder: Path, boot_id: str) -> FileJournal:
    """The journal in a folder, made if there is none. Waits for the disk; belongs in a thread or before the loop.

    The folder is locked until `stop`, or the end of this process.

    Args:
        folder: Made, with mode 0700, if only it is missing.
        boot_id: The host's (random(4)). Leases of another boot have ended with it; their fences stay.

    Raises JournalBroken.
    """
    raise NotImplementedError
