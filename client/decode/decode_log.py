"""The log of a decoder's losses and recoveries: one line per event, rate-limited by event and tenant.

A line is `event key=value ...`, in logfmt. A text that is not a simple word is written as a JSON string, so that a
tenant's text can't end a line or forge another. For handlers in programs, each record of `logging` has the event and
its fields in the attribute `gpulease`.
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
"""Number of lines of one event and tenant that may be logged in a burst, for example the replays of one lost region."""

LINE_EVERY_S: Final = 1.0
"""Seconds between lines after the burst, so that a tenant that keeps losing regions can't fill a disk."""

MAX_TEXT_CHARACTERS: Final = 500
"""Maximum number of characters of a text in a line. Callers choose request ids, and messages may repeat them."""

_WORD: Final = re.compile(r"[A-Za-z0-9_.:/+-]+")

Field = str | int | float | bool


class DecodeLog:
    """Writes one decoder's lines. Lines beyond the limit are counted, and the next line has the count as `suppressed`.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # This stays small, because the code defines the events and the settings define the tenants.
        self._budgets: dict[tuple[str, str], LogBudget] = {}

    def info(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Log an expected event, such as a recovery."""
        self._write(logging.INFO, event, tenant, fields)

    def warning(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Log an event that an operator may want to investigate, even though the decoder recovers without help."""
        self._write(logging.WARNING, event, tenant, fields)

    def error(self, event: str, *, tenant: str = "", **fields: Field) -> None:
        """Log an event from which the decoder does not recover without help."""
        self._write(logging.ERROR, event, tenant, fields)

    def failure(self, event: str, error: BaseException, *, tenant: str = "", **fields: Field) -> None:
        """Log an exception: as a warning if it is a GpuLeaseError, otherwise as an error with its traceback."""
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
        # The first line after a gap shows how many lines are missing.
        if suppressed:
            fields["suppressed"] = suppressed
        line = " ".join([event, *(f"{name}={_shown(value)}" for name, value in fields.items())])
        if fault is not None:
            # Log the traceback as text: a record with the exception would keep its frames, and the engine, alive.
            line += "\n" + "".join(traceback.format_exception(fault)).rstrip()
        LOG.log(level, "%s", line, extra={"gpulease": (event, fields)})


def cause_of(error: BaseException) -> str:
    """Return an error in the form of log lines: its class and its text."""
    return f"{type(error).__name__}: {error}"


def _shown(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = shortened(str(value), MAX_TEXT_CHARACTERS)
    return text if _WORD.fullmatch(text) else json.dumps(text)
