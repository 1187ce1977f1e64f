"""Exit statuses of commands, and a sentence for every failure, never a traceback."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import click

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
"""The command line is invalid; click uses this status, too."""

EXIT_NO_DAEMON: Final = 69
"""EX_UNAVAILABLE of sysexits(3): no daemon answers."""

EXIT_FAULT: Final = 70
"""EX_SOFTWARE: a bug in this program itself."""

EXIT_CANNOT_WRITE: Final = 74
"""EX_IOERR: a file or the output can't be read or written."""

TRACEBACK_VARIABLE: Final = "GPULEASE_TRACEBACK"
"""If this variable is set, a bug in this program is shown as a Python traceback, for its authors."""


class MissingPrerequisite(Exception):
    """A prerequisite of the command, other than a running daemon, is missing; the message names it."""


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Import packages that only an extra (or several, with commas) installs.

    Raises MissingPrerequisite if one is missing.
    """
    try:
        yield
    except ImportError as error:
        # An import error inside this package is a bug, and must not be reported as a missing extra.
        if error.name is None or error.name.partition(".")[0] == "gpulease":
            raise
        # If the installed version of a package lacks a name, the message names the package.
        problem = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        raise MissingPrerequisite(f"{problem}: pip install '.[{extra}]' in gpulease's repository") from None


@contextmanager
def failures_as_sentences() -> Iterator[None]:
    """End the process with a sentence on stderr, and a status for the kind of failure."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        # click itself prints these and sets the exit status.
        raise
    # Die by the signal itself, so that a shell's loop stops, too.
    except KeyboardInterrupt:
        die_by_signal(signal.SIGINT)
    except BrokenPipeError:
        die_by_signal(signal.SIGPIPE)
    except MissingPrerequisite as error:
        fail(str(error), EXIT_FAILED)
    # Often the failure was in writing the output, for example to a full disk, so drop the rest of it.
    except OSError as error:
        _drop_output()
        fail(_about(error), EXIT_CANNOT_WRITE)
    except Exception as error:
        _fail_by(error)


def _fail_by(error: Exception) -> NoReturn:
    # Import these only here, because that takes longer than most commands take to run.
    from gpulease.client.errors import Disconnected, GpuLeaseError

    if isinstance(error, Disconnected):
        fail(str(error), EXIT_NO_DAEMON)
    if isinstance(error, GpuLeaseError):
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    description = f"{type(error).__name__}: {error}"
    fail(
        f"an internal error of gpulease: {description}. Set {TRACEBACK_VARIABLE}=1 to see where it happened", EXIT_FAULT
    )


def check_words(words: Iterable[str]) -> None:
    """End with EXIT_USAGE if an argument is not valid text, because no request can contain it."""
    for word in words:
        # Python passes bytes that the locale can't decode as surrogates (PEP 383).
        if any("\ud800" <= mark <= "\udfff" for mark in word):
            fail(f"{word!r} can't be decoded in this locale", EXIT_USAGE)


def fail(message: str, status: int) -> NoReturn:
    """Print a sentence on stderr, and exit with that status."""
    from gpulease.client.console.tables import shown

    # If stderr is closed as well, only the status reports the failure.
    with suppress(OSError):
        click.echo("gpulease: " + "\n".join(map(shown, message.splitlines())), err=True)
    sys.exit(status)


def die_by_signal(number: signal.Signals) -> NoReturn:
    """End as the signal ends any program, so that a shell notices it and stops its script, too."""
    if number == signal.SIGPIPE:
        _drop_output()
    # Write the output that was printed before the signal.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):  # SIGKILL has no other handler
        signal.signal(number, signal.SIG_DFL)
    # The signal may be blocked here, and would then stay pending forever.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


@contextmanager
def if_interrupted(note: Callable[[], str]) -> Iterator[None]:
    """If the block is interrupted, print a line on stderr about what the daemon may have done or may still do.

    `note`: Returns the line, when the interrupt has occurred.
    """
    try:
        yield
    except KeyboardInterrupt:
        from gpulease.client.console.tables import shown

        with suppress(OSError):
            click.echo(f"gpulease: interrupted. {shown(note())}", err=True)
        raise


def _about(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else f"can't read or write: {reason}"


def _drop_output() -> None:
    """Redirect unwritten output to /dev/null, so that the interpreter does not fail to write it again at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
