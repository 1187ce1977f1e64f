"""How the daemon's parts say what happens."""

import logging
import sys
from typing import Final

from gpulease.daemon.lease_ids import lease_text
from gpulease.daemon.logs.catalogue import LogEvent

Value = str | int | float | bool | list[str] | None

ATTRIBUTE: Final = "gpulease"
"""Of a `logging.LogRecord`: its event and fields."""

_log: Final = logging.getLogger("gpulease")


def tell(event: LogEvent, message: str = "", /, *, is_fault: bool = False, **fields: Value) -> None:
    """Log one event.

    Args:
        event: Which.
        message: In place of the event's own; nothing in it may be a tenant's.
        is_fault: With the traceback of the exception that is being handled.
        fields: Those of the event's that are known; None is left out. A lease's id is given as its number.
    """
    kind = event.value
    if not _log.isEnabledFor(kind.level):
        return
    if isinstance(number := fields.get("lease_id"), int):
        fields["lease_id"] = lease_text(number) if number else None
    failure = sys.exc_info() if is_fault else None
    # Not `Logger.log`: to find its caller's file and line, which nobody is shown, takes as long as all the rest.
    record = logging.LogRecord(_log.name, kind.level, "", 0, message or kind.message, (), failure)
    setattr(record, ATTRIBUTE, (kind.name, fields))
    _log.handle(record)


def is_told(event: LogEvent) -> bool:
    """Whether events of this level are logged at all."""
    return _log.isEnabledFor(event.level)
