"""The log of a decoder's losses and recoveries: one line per event, rate-limited by event and tenant.

A line is `event key=value ...`, in logfmt. Texts with characters other than a word's are JSON strings, so that a
tenant's text can't end a line or forge another. For handlers in programs, a record of `logging` has event and fields in
its attribute `gpulease`.
"""

import json
import logging
import re
import time
import traceback
from collections.abc import Callable
from typing import Final

from gpulease.client.errors import GpuLeaseError
from gpulease.protocol.foreign_text import shortened
from gpulease.protocol.log_budget import LogBudget
from gpulease.protocol.time_units import NS_PER_S

LOG: Final = logging.getLogger("gpulease.decode")

LINES_AT_ONCE: Final = 64
"""Lines of one event and tenant that are logged at once, typically for the replays of one lost region."""

LINE_EVERY_S: Final = 1.0
"""Seconds between lines after those, so that a tenant that continually loses regions can't fill a disk."""

MAX_TEXT_CHARACTERS: Final = 500
"""Maximum number of characters of a text in a line. Callers choose request ids, and messages may repeat them."""

_WORD: Final = re.compile(r"[A-Za-z0-9_.:/+-]+")

Field = str | int | float | bool


class DecodeLog:
    """Writes one decoder's lines. Lines beyond the limit are counted; the next line has the count as `suppressed`.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Bounded: the code names the events, and the settings the tenants.
        self._budgets: dict[tuple[str, str], LogBudget] = {}

    def info(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Write an expected event, such as a recovery."""
        self._write(logging.INFO, event, tenant, fields)

    def warning(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Log an event that an operator may want to investigate, although the decoder recovers without help."""
        self._write(logging.WARNING, event, tenant, fields)

    def error(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Write an event that the decoder does not recover from by itself."""
        self._write(logging.ERROR, event, tenant, fields)

    def failure(self, event: str, error: BaseException, *, tenant: str = "", **fields: Field) -> None:
        """Write an error: as a warning if it is the library's own, else as an error with its traceback."""
        fields = {"cause": cause_of(error), **fields}
        if isinstance(error, GpuLeaseError):
            self._write(logging.WARNING, event, tenant, fields)
        else:
            self._write(logging.ERROR, event, tenant, fields, error)

    def _write(
        self, level: int, event: str, tenant: str, fields: dict[str, Field], fault: BaseException | None = None
    ) -> None:
        key = event, tenant
        # Each event and tenant has its own budget, so that a flood of one does not hide the others.
        budget = self._budgets.get(key)
        if budget is None:
            budget = self._budgets[key] = LogBudget(LINES_AT_ONCE, round(LINE_EVERY_S * NS_PER_S))
        suppressed = budget.spend(round(self._clock() * NS_PER_S))
        if suppressed is None:
            return
        if tenant:
            fields = {"tenant": tenant, **fields}
        # The first line after a gap says how many are missing.
        if suppressed:
            fields["suppressed"] = suppressed
        line = " ".join([event, *(f"{name}={_shown(value)}" for name, value in fields.items())])
        if fault is not None:
            # As text: a record that kept the exception would keep its frames, and so the lost engine, alive.
            line += "\n" + "".join(traceback.format_exception(fault)).rstrip()
        LOG.log(level, "%s", line, extra={"gpulease": (event, fields)})


def cause_of(error: BaseException) -> str:
    """Return an error as it is shown in a line: its class and its text."""
    return f"{type(error).__name__}: {error}"


def _shown(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = shortened(str(value), MAX_TEXT_CHARACTERS)
    return text if _WORD.fullmatch(text) else json.dumps(text)
