"""Logs as files, for those who read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpulease.daemon.audit.files import HEAD_NAME, log_files
from gpulease.daemon.audit.records import HEAD_BYTES, MAX_RECORD_BYTES, Head, NotAHead, Record, read_head
from gpulease.daemon.audit.verification import Verifier


class CannotRead(Exception):
    """A log that can't be read; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """The files of a log, oldest first, and its head if there is one to be found."""

    files: tuple[Path, ...]
    head: Head | None

    def lines(self) -> Iterator[tuple[str, int, bytes]]:
        """(file, where the line begins, the line with its newline), in pieces where it is longer than any record."""
        for path in self.files:
            offset = 0
            try:
                with path.open("rb") as file:
                    while line := file.readline(MAX_RECORD_BYTES + 2):
                        yield path.name, offset, line
                        offset += len(line)
            except OSError as error:
                raise CannotRead(f"{path}: {error.strerror}") from None

    def records(self, verifier: Verifier | None = None) -> Iterator[Record]:
        """What can be read as records, whether the chain holds or not, of which a `verifier` can tell afterwards."""
        verifier = verifier or Verifier()
        for file, offset, line in self.lines():
            if (record := verifier.take(file, offset, line)) is not None:
                yield record


def find_log(paths: Sequence[Path], head_path: Path | None = None) -> LogSource:
    """The log in a folder, or in files given in their order. Raises CannotRead.

    The head is read first: what a daemon writes meanwhile can only make the log longer than its head.
    """
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    head = _head(head_path or folder / HEAD_NAME, is_expected=head_path is not None)
    files: list[Path] = []
    for path in paths:
        try:
            files += log_files(path) if path.is_dir() else [path]
        except OSError as error:
            raise CannotRead(f"{path}: {error.strerror}") from None
    if not files:
        raise CannotRead(f"there is no audit log in {folder}")
    return LogSource(tuple(files), head)


def _head(path: Path, *, is_expected: bool) -> Head | None:
    try:
        with path.open("rb") as file:
            return read_head(file.read(HEAD_BYTES + 1))
    except FileNotFoundError:
        if not is_expected:
            return None
        raise CannotRead(f"there is no head at {path}") from None
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None
    except NotAHead as error:
        raise CannotRead(f"{path} is not a head: {error}") from None
