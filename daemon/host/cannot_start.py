"""Errors that keep the daemon from starting, with texts for its operator.

Each part of the daemon has a subclass. Some of these errors are also raised while the daemon runs; the code that
catches them then tries again or reports them.
"""

import os
from typing import ClassVar


class CannotStart(Exception):
    """The daemon can't start; a later start may succeed. The message is a sentence for the operator.

    Attributes:
        hint: A sentence with advice for the operator, or "".
        status: The exit status of the daemon, one of sysexits(3). With EX_UNAVAILABLE and EX_IOERR a later start may
            succeed. With EX_CONFIG, EX_DATAERR, EX_OSERR and EX_NOPERM a restart would fail the same way.
    """

    usual_status: ClassVar[int] = os.EX_UNAVAILABLE

    def __init__(self, message: str, hint: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status or self.usual_status


class Misconfigured(CannotStart):
    """The daemon can't start with these settings, now or later."""

    usual_status = os.EX_CONFIG
