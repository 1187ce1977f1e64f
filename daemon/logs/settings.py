"""How the daemon logs: in which form, from which level on; and the same for the processes it starts."""

import logging
import os
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.shapes import HumanShape, JsonShape, Shape, is_journal
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.logs.writing import HeedlessHandler, QueueingHandler

FORMATS: Final = ("auto", "human", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

VARIABLE: Final = "GPULEASE_LOG"
"""By which the daemon tells its own processes; what others set there is not heeded."""


@dataclass(frozen=True, slots=True)
class LogStyle:
    """The form, one of `FORMATS`, and the least level, one of `LEVELS`. Auto: for people if they look, else JSON."""

    form: str = "auto"
    level: str = "info"

    def shape(self, process: str) -> Shape:
        """What lines look like that this process writes to standard error."""
        for_journal = is_journal(2)
        is_terminal = os.isatty(2)
        if self.form == "json" or (self.form == "auto" and not is_terminal):
            return JsonShape(process, for_journal=for_journal)
        in_colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        return HumanShape(in_colour=in_colour, for_journal=for_journal)


def begin_logging(settings: LogStyle) -> None:
    """Log what this process, the broker, says, and have those it starts do the same; again to change the settings."""
    os.environ[VARIABLE] = f"{settings.form},{settings.level}"
    _set_level(settings)
    shape = settings.shape("broker")
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, QueueingHandler):
            handler.take_shape(shape)
            return
    root.addHandler(QueueingHandler(shape))
    _log_what_python_says()


def go_on_logging(process: str, *, opens_own: bool = True) -> None:
    """Log what this process says, one that the broker has started and that forks, so that it has no thread.

    Not `opens_own`: with no descriptor but standard error, because this process closes those it does not know.
    """
    form, _, level = os.environ.get(VARIABLE, "").partition(",")
    settings = LogStyle(form if form in FORMATS else "auto", level if level in LEVELS else "info")
    _set_level(settings)
    logging.getLogger().addHandler(HeedlessHandler(settings.shape(process), opens_own=opens_own))
    _log_what_python_says()


def stop_logging() -> None:
    """In a process just forked that is to be heard by its own standard error alone."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def flush_logs() -> None:
    """Before something is said past the log: let what was logged be first."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stderr.flush()


def is_for_people() -> bool:
    """Whether why the daemon ends is to be a sentence: it is, unless programs read its log."""
    return not is_journal(2) and os.environ.get(VARIABLE, "").partition(",")[0] != "json"


def _set_level(settings: LogStyle) -> None:
    # What no record shows need not be found out for each: see "Optimization" in Python's Logging HOWTO.
    logging.logThreads = logging.logMultiprocessing = False
    logging.getLogger().setLevel(settings.level.upper())
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))


def _log_what_python_says() -> None:
    """Text that is no record would tear the log: exceptions that nobody catches, and warnings."""
    logging.captureWarnings(True)

    def on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _tell_fault("uncaught", error)

    def on_unraisable(told: "sys.UnraisableHookArgs") -> None:
        _tell_fault(f"{told.err_msg or 'ignored in'} {told.object!r}", told.exc_value)

    def on_end_of_thread(told: threading.ExceptHookArgs) -> None:
        _tell_fault(f"thread {told.thread.name if told.thread else ''}", told.exc_value)

    sys.excepthook, sys.unraisablehook, threading.excepthook = on_uncaught, on_unraisable, on_end_of_thread


def _tell_fault(doing: str, error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    except BaseException:
        tell(LogEvent.DAEMON_FAULT, is_fault=True, doing=doing)
