"""Exit statuses of commands, and a sentence for every failure, never a traceback."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import click

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
"""The command line makes no sense; click uses it, too."""

EXIT_NO_DAEMON: Final = 69
"""EX_UNAVAILABLE of sysexits(3): no daemon answers."""

EXIT_FAULT: Final = 70
"""EX_SOFTWARE: a fault of this program itself."""

EXIT_CANNOT_WRITE: Final = 74
"""EX_IOERR: a file or the output can't be read or written."""

TRACEBACK_VARIABLE: Final = "GPULEASE_TRACEBACK"
"""If set, a fault of this program is shown as Python's traceback, for its authors."""


class CannotStart(Exception):
    """A prerequisite of the command, other than a running daemon, is missing; the message names it."""


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Import what only an extra, or several with commas, installs. Raises CannotStart if it is not installed."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "gpulease":
            raise  # a fault of ours
        # A package that is there, in a version without what is asked for, is named by the message.
        what = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        raise CannotStart(f"{what}: pip install '.[{extra}]' in gpulease's repository") from None


@contextmanager
def failures_as_sentences() -> Iterator[None]:
    """End the process with a sentence on stderr and a status for the kind of failure."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        die_by_signal(signal.SIGINT)
    except BrokenPipeError:
        die_by_signal(signal.SIGPIPE)
    except CannotStart as error:
        fail(str(error), EXIT_FAILED)
    except OSError as error:
        _drop_output()
        fail(_about(error), EXIT_CANNOT_WRITE)
    except Exception as error:
        _fail_by(error)


def _fail_by(error: Exception) -> NoReturn:
    # Imported here, because importing these takes longer than most commands take to run.
    from gpulease.client.errors import Disconnected, GpuLeaseError

    if isinstance(error, Disconnected):
        fail(str(error), EXIT_NO_DAEMON)
    if isinstance(error, GpuLeaseError):
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    about = f"{type(error).__name__}: {error}"
    fail(f"a fault of gpulease itself: {about}. With {TRACEBACK_VARIABLE}=1 it shows where", EXIT_FAULT)


def check_words(words: Iterable[str]) -> None:
    """End with EXIT_USAGE if an argument is not decodable text: no message could carry it."""
    for word in words:
        # Python passes bytes that the locale can't decode as surrogates (PEP 383).
        if any("\ud800" <= mark <= "\udfff" for mark in word):
            fail(f"{word!r} can't be decoded in this locale", EXIT_USAGE)


def fail(message: str, status: int) -> NoReturn:
    """Print a sentence on stderr and exit."""
    from gpulease.client.console.tables import shown

    with suppress(OSError):
        click.echo("gpulease: " + "\n".join(map(shown, message.splitlines())), err=True)
    sys.exit(status)


def die_by_signal(number: signal.Signals) -> NoReturn:
    """End as a signal ends any program: a shell sees it, and stops its script, too."""
    if number == signal.SIGPIPE:
        _drop_output()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):  # SIGKILL has no other handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


def interrupt_unwinds() -> None:
    """From here on an interrupt raises KeyboardInterrupt, so that a command undoes the steps that it has begun."""
    with suppress(ValueError):  # not the main thread: then no signal is handled here
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _about(error: OSError) -> str:
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else f"can't read or write: {said}"


def _drop_output() -> None:
    """Send unwritten output to /dev/null, so that the interpreter does not fail to write it again at its end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
