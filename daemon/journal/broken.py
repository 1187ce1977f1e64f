"""A journal that can't be used, as its operator is told."""

from typing import Final

EX_DATAERR: Final = 65
"""sysexits(3): what is there is not what was written. A restart would fail the same way."""

EX_UNAVAILABLE: Final = 69
"""sysexits(3): somebody else has it. A later start may succeed."""

EX_IOERR: Final = 74
"""sysexits(3): the disk refuses. A later start may succeed."""

EX_CONFIG: Final = 78
"""sysexits(3): the folder is not one that can be used."""

MOVE_ASIDE: Final = (
    "Restore it from where it was, or move the folder's journal files aside: then the daemon ends sessions that run,"
    " and forgets their leases and every fence and revocation."
)


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


def not_whole(path: object, why: str) -> JournalBroken:
    """What is there is not all that was written, or not only that."""
    return JournalBroken(f"the journal {path} is broken: {why}", MOVE_ASIDE, EX_DATAERR)
