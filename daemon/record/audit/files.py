"""The audit log's files: appends records, makes them durable, and finds the log's end after a crash.

Files are opened with O_APPEND and mode 0600, and written bytes never change. A new file's name is made durable in its
folder. If the operator limits the number of files, only complete files are removed.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.record.audit.records import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    ChainEnd,
    Draft,
    Head,
    LeaseStage,
    NotAHead,
    NotARecord,
    RecordKind,
    hash_of,
    head_bytes,
    read_head,
    read_record,
    seal,
)
from gpulease.protocol.fast_dataclass import dataclass

HEAD_NAME: Final = "head.json"
FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

REWRITE_BYTES: Final = 1 << 20
"""Maximum number of bytes that `rewrite` has in memory at a time."""

TAIL_BYTES: Final = 4 << 20
"""Number of bytes at the log's end that the daemon reads at its start. They have about 8,000 records, and reading them
takes a tenth of a second. A daemon that was killed may have written up to this many ends of leases to only one of log
and journal."""

_KINDS: Final = {kind.value: kind for kind in RecordKind}

_NAME: Final = re.compile(r"audit-\d{16}\.jsonl")


class FolderInUse(Exception):
    pass


class LogDisturbed(OSError):
    """The newest file has changed since it was closed: another program wrote to it, moved it or removed it."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where a log is, and how much of it is kept.

    Attributes:
        folder: The folder. It is made if its parent exists.
        head_path: The head's file.
        max_file_bytes: The size in bytes at which the next file begins. A file that has a single group of records may
            be larger.
        keep_files: Number of files to keep; 0 to keep all.
    """

    folder: Path
    head_path: Path
    max_file_bytes: int
    keep_files: int = 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a file: its last record (number 0 if it has none), and the offset after that record."""

    end: ChainEnd
    end_bytes: int


def log_files(folder: Path) -> list[Path]:
    """Return a log's files, oldest first. Raises OSError."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


@dataclass(frozen=True, slots=True)
class LastRecords:
    """A summary of the last records of a log.

    Attributes:
        kinds: For each lease, the kind of its record with the latest stage, for example END.
        cut_us: The monotonic time of the last record in microseconds, if later records may be missing. None if the
            daemon stopped normally, the log is empty, or the log is from another boot of the host.
    """

    kinds: Mapping[str, RecordKind] = field(default_factory=dict)
    cut_us: int | None = None


def last_records(folder: Path, boot: str) -> LastRecords:
    """Summarise the last TAIL_BYTES of a log. Lines that are not records are skipped. Raises OSError."""
    kinds: dict[str, RecordKind] = {}
    cut_us = None
    for line in _last_lines(folder):
        with contextlib.suppress(NotARecord, ValueError):
            # Records may be missing after this one, unless it is a STOP or from another boot.
            record = read_record(line)
            cut_us = record.mono_us if record.boot == boot and record.kind != RecordKind.STOP else None
            kind, lease = _KINDS.get(record.kind), record.data.get("lease")
            if kind is None or kind.stage is None or not isinstance(lease, str):
                continue
            # Keep the kind with the latest stage: a lease with an END has ended, whatever records follow.
            if kind.stage >= (kinds.get(lease, kind).stage or LeaseStage.LIVE):
                kinds[lease] = kind
    return LastRecords(kinds, cut_us)


def _last_lines(folder: Path) -> list[bytes]:
    """Return the last lines of a log, oldest first. The first may be a piece of a line."""
    pieces: list[bytes] = []
    rest_bytes = TAIL_BYTES
    # Begin with the newest file, and go back until enough bytes are read.
    for path in reversed(log_files(folder)):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - rest_bytes))
            pieces.insert(0, file.read(rest_bytes))
        rest_bytes -= len(pieces[0])
        if rest_bytes <= 0:
            break
    return [line for piece in pieces for line in piece.splitlines()]


def tail_of(data: bytes | mmap.mmap) -> Tail:
    """Find the last complete record in a file's bytes. A record that lacks only its newline is complete."""
    stop = len(data)
    # Read line by line from the end, until a line is a record. Other lines are pieces that a crash left.
    while stop:
        body_end = stop - (data[stop - 1 : stop] == b"\n")
        start = data.rfind(b"\n", 0, body_end) + 1
        with contextlib.suppress(NotARecord):
            # Copy one byte more than a record may have. A longer line then fails, and is not copied as a whole.
            line = bytes(data[start : min(body_end, start + MAX_RECORD_BYTES + 1)])
            return Tail(ChainEnd(read_record(line).seq, hash_of(line)), stop)
        stop = start
    return Tail(ChainEnd(), 0)


class AuditLog:
    """An open log. Used by one thread at a time.

    Args:
        chain_end: A record that was in the log, according to the caller. The chain continues after it, even if the
        files or the head now end earlier.

    Attributes:
        end: The last durable record.
        findings: Problems that were found when the log was opened, for the next record's particulars. "torn": offset,
            size and hash of the bytes after the last record. "head": why the head can't be read. "unanchored": the
            number of records after the head. "lost": the numbers of the first and the last missing record. "edited":
            the record with another hash.
        previous: The head as read when the log was opened; None if it could not be read.
        attempted: The end of the chain after each record of the last `append`, which may have failed.

    Raises:
        FolderInUse: Another process has the log open.
        OSError: The log can't be opened.
    """

    def __init__(self, settings: LogSettings, boot: str, chain_end: ChainEnd | None = None) -> None:
        self.end = ChainEnd()
        self.findings: dict[str, Any] = {}
        self.previous: Head | None = None
        self.attempted: list[ChainEnd] = []
        self._settings = settings
        self._boot = boot
        self._known = chain_end or ChainEnd()
        self._separator = b""
        self._path = settings.folder
        self._files: list[Path] = []
        self._folder_fd = self._head_fd = self._fd = -1
        self._size = 0
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def append(self, drafts: Sequence[Draft], alive_us: int) -> None:
        """Chain records, write them and make them durable. After an OSError, close the log and open it again."""
        self.attempted = []
        self._check_undisturbed()
        # Seal all records first: each has the hash of the one before it.
        lines, end = [self._separator], self.end
        for draft in drafts:
            line, end = seal(draft, end, self._boot)
            lines += (line, b"\n")
            self.attempted.append(end)
        data = b"".join(lines)
        # Begin a new file only if no line is torn, because the record that describes a torn line must be in the same
        # file.
        if self._size and not self._separator and self._size + len(data) > self._settings.max_file_bytes:
            self._begin_file()
        # Write the head only after the records are synced. A head with a later record than the log means that the log
        # was cut.
        self._write(data)
        os.fdatasync(self._fd)
        self._separator = b""
        self.end = end
        self.beat(alive_us)

    def beat(self, alive_us: int) -> None:
        """Write the head, with the log's end and the monotonic time now. Raises OSError."""
        os.pwrite(self._head_fd, head_bytes(Head(self.end, self._boot, alive_us)), 0)

    def rewrite(self) -> None:
        """Write the newest file's bytes again, in their places. Raises OSError.

        After a failed sync, the kernel may mark pages as clean that never reached the disk (fsync(2), EIO). Writing the
        pages again makes the next sync include them.
        """
        with self._path.open("r+b", buffering=0) as file:
            offset = 0
            while chunk := os.pread(file.fileno(), REWRITE_BYTES, offset):
                offset += os.pwrite(file.fileno(), chunk, offset)

    def sync_head(self) -> None:
        """Make the head durable. A head that is older than its log is still valid. Raises OSError."""
        os.fdatasync(self._head_fd)

    def superfluous(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the oldest file and the particulars of its `prune` record; None if no file must be removed."""
        if not 0 < self._settings.keep_files < len(self._files):
            return None
        oldest, following = self._files[:2]
        # The first record of the next file has the hash of the oldest file's last record, so the oldest file need not
        # be read.
        with following.open("rb") as file:
            line = file.readline(MAX_RECORD_BYTES + 1)
        with contextlib.suppress(NotARecord):
            first = read_record(line.removesuffix(b"\n"))
            return oldest, {"file": oldest.name, "last": first.seq - 1, "hash": first.prev}
        return None

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._files.remove(path)
        os.fsync(self._folder_fd)

    def close(self) -> None:
        """Close all descriptors, which unlocks the folder."""
        for fd in (self._fd, self._head_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._folder_fd = self._head_fd = self._fd = -1

    # --- the end that the last daemon left ---

    def _open(self) -> None:
        # Lock first, because nothing may be read while another daemon writes.
        self._lock_folder()
        self._head_fd = _open_file(self._settings.head_path, os.O_RDWR | os.O_CREAT)
        self._files = log_files(self._settings.folder)
        self._find_end()
        # Continue the newest file, or begin the first one. Its name has the number of its first record.
        if self._files:
            self._take_file(self._files[-1], _open_file(self._files[-1], os.O_WRONLY | os.O_APPEND))
        else:
            self._begin_file()

    def _find_end(self) -> None:
        # Find the last complete record. The newest file may have none, because a crash right after its creation leaves
        # it empty.
        tail = Tail(ChainEnd(), 0)
        for path in reversed(self._files):
            size = path.stat().st_size
            tail = _tail_of_file(path) if size else tail
            # Only the newest file may end in a torn line. All others were complete when the next file began.
            if path == self._files[-1]:
                self._find_torn(path, tail.end_bytes, size)
            if tail.end.seq:
                break
        # The file, the head and the caller each have an end. Continue after the latest of the three, so that lost
        # records leave a gap in the numbers.
        self.end = self._compare_with_known_end(self._compare_with_head(tail.end))

    def _find_torn(self, path: Path, end_bytes: int, size: int) -> None:
        with path.open("rb") as file:
            # If the last record is complete, with its newline, nothing is torn.
            file.seek(max(0, end_bytes - 1))
            if end_bytes == size and (not size or file.read(1) == b"\n"):
                return
            # Write the missing newline before the next record. If bytes follow the last record, the next one describes
            # them.
            self._separator = b"\n"
            if end_bytes < size:
                file.seek(end_bytes)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                self.findings["torn"] = {"offset": end_bytes, "size_bytes": size - end_bytes, "sha256": sha256}

    def _compare_with_head(self, end: ChainEnd) -> ChainEnd:
        """Return the later one of the log's end and the head's."""
        data = os.pread(self._head_fd, HEAD_BYTES + 1, 0)
        try:
            head = self.previous = read_head(data)
        except NotAHead as error:
            if end.seq:
                self.findings["head"] = f"it can't be read: {error}" if data else "it is missing"
            return end
        # The log has records after the head's. That is normal after a crash, because the head is written after each
        # sync.
        if end.seq > head.end.seq:
            self.findings["unanchored"] = end.seq - head.end.seq
            return end
        # The head has a later record than the log: records that were durable are missing.
        if end.seq < head.end.seq:
            self.findings["lost"] = {"first": end.seq + 1, "last": head.end.seq}
        elif end.hash != head.end.hash:
            self.findings["edited"] = end.seq
        return head.end

    def _compare_with_known_end(self, end: ChainEnd) -> ChainEnd:
        """Return the later one of `end` and the caller's `chain_end`."""
        if end.seq > self._known.seq:
            return end
        if end.seq < self._known.seq:
            # Keep the first lost record that the head has shown, if any.
            first = self.findings.get("lost", {"first": end.seq + 1})["first"]
            self.findings["lost"] = {"first": first, "last": self._known.seq}
        elif end.hash != self._known.hash:
            self.findings["edited"] = end.seq
        return self._known

    # --- descriptors ---

    def _lock_folder(self) -> None:
        folder = self._settings.folder
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        self._folder_fd = _open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"another gpuleased writes the audit log in {folder}") from None

    def _begin_file(self) -> None:
        path = self._settings.folder / f"audit-{self.end.seq + 1:016d}.jsonl"
        self._take_file(path, _open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL))
        self._files.append(path)
        os.fsync(self._folder_fd)

    def _take_file(self, path: Path, fd: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd, self._size = path, fd, os.fstat(fd).st_size

    def _check_undisturbed(self) -> None:
        try:
            path_status, own_status = os.stat(self._path), os.fstat(self._fd)
        except FileNotFoundError:
            raise LogDisturbed(errno.ENOENT, "the newest file of the audit log is gone") from None
        # Another program has replaced the file if the inode differs, or has written to it if the size differs.
        if path_status.st_ino != own_status.st_ino or path_status.st_size != self._size:
            raise LogDisturbed(errno.ESTALE, "the newest file of the audit log is not as the last daemon left it")

    def _write(self, data: bytes) -> None:
        unwritten = memoryview(data)
        while unwritten:
            # write(2) may write only part, for example when the disk fills up.
            written = os.write(self._fd, unwritten)
            self._size += written
            unwritten = unwritten[written:]


def _tail_of_file(path: Path) -> Tail:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return tail_of(data)


def _open_file(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
