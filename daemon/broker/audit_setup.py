"""Opens a running daemon's audit log when the daemon starts, and closes it with a record of the daemon's stop."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.config.settings import Config, ConfigError
from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.record.audit.files import HEAD_NAME, AuditLog, FolderInUse, LastRecords, LogSettings, last_records
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.recorder import FactRecorder, LogRecorder
from gpulease.daemon.record.audit.records import HEAD_BEGIN, MAX_INTEGER, canonical_bytes
from gpulease.protocol.foreign_text import encodable
from gpulease.protocol.settings_reader import declared

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class CannotRecord(CannotStart):
    """The operator requires an audit log and it can't be written. The message is a sentence for the operator."""


@contextlib.asynccontextmanager
async def open_recorder(config: Config, driver: str, cards: Sequence[Card]) -> AsyncIterator[FactRecorder]:
    """Open the audit log until the block is left. Without an audit log, the recorder discards everything.

    Raises:
        CannotRecord: The operator requires the log, and it can't be written.
        ConfigError: The configured place can't hold a log.
    """
    if config.audit is None:
        yield FactRecorder()
        return
    settings = LogSettings(
        config.audit, config.audit_head or config.audit / HEAD_NAME, config.audit_file_bytes, config.audit_keep_files
    )
    _check_place("audit", settings.folder, is_folder=True)
    if config.audit_head is not None:
        _check_place("audit_head", config.audit_head, is_folder=False)
        _check_head(config.audit_head)
    boot = boot_id()
    # The last records show which leases have no recorded end. Read them before the log is opened for
    # writing.
    recorder = LogRecorder(config.audit_required, await asyncio.to_thread(_last_records, settings.folder, boot))
    writer = AuditWriter(
        lambda known: AuditLog(settings, boot, known), _start_record(config, driver, cards), recorder.on_change
    )
    try:
        await asyncio.to_thread(writer.start, must_work=config.audit_required)
    except (OSError, FolderInUse) as error:
        problem = _reason(error) if isinstance(error, OSError) else str(error)
        raise CannotRecord(f"the audit log can't be written: {problem}") from None
    # Only now does the recorder have a writer, so a failed start leaves no half-open log behind.
    recorder.write_with(writer)
    try:
        yield recorder
    finally:
        await recorder.stop()


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    # `filename` is set only by calls that take a path. Calls that write take a descriptor.
    return f"{error.filename}: {reason}" if error.filename else reason


def boot_id() -> str:
    """Return the kernel's id of this boot (random(4)), 32 hex digits."""
    return _BOOT_ID.read_text().strip().replace("-", "")


def config_digest(config: Config) -> str:
    """Return the SHA-256 of all settings in canonical form, in hexadecimal. Their order does not change it.

    A setting that was added after the first digests is left out while it has its default, so that an upgrade changes no
    digest.
    """
    leaves = sorted(_leaves(config), key=lambda leaf: leaf[:-1])
    return hashlib.sha256(canonical_bytes(leaves)).hexdigest()


def _start_record(config: Config, driver: str, cards: Sequence[Card]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "config": config_digest(config),
        "driver": driver,
        "pid": os.getpid(),
        "cards": [{"card": card.uuid, "capacity_bytes": card.capacity_bytes} for card in cards],
    }


def _last_records(folder: Path, boot: str) -> LastRecords:
    # An unreadable log is reported when it is opened.
    try:
        return last_records(folder, boot)
    except OSError:
        return LastRecords()


def _check_place(setting: str, path: Path, *, is_folder: bool) -> None:
    """Check that the audit log's path is valid and that the daemon may write there.

    Raises ConfigError if the path can't be used: unlike with a full disk, waiting would not help.
    """
    # Check in the order in which an operator would check: the path itself, its folder, and the permission to write
    # there.
    if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
        kind = "folder, not a file" if is_folder else "regular file, not a folder, a FIFO or a device"
        raise ConfigError(f"setting {setting}: {path} must be a {kind}")
    if not path.parent.is_dir():
        raise ConfigError(f"setting {setting}: the folder {path.parent} does not exist")
    place = path if is_folder and path.exists() else path.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"setting {setting}: the daemon's user may not write in {place}")


def _check_head(path: Path) -> None:
    """Raise ConfigError if the file has other contents than a head: the log would overwrite them.

    A damaged head is no error. The log records it and continues.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(HEAD_BEGIN))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"setting audit_head: {path}: {error.strerror}") from None
    # After a power failure a new head may consist of zeros.
    if begin.strip(b"\0") and begin != HEAD_BEGIN:
        raise ConfigError(
            f"setting audit_head: {path} contains something other than an audit log's head, which would be "
            "overwritten; name another file"
        )


def _leaves(value: Any, *path: str) -> Iterator[list[Any]]:
    """Yield each setting after the names that contain it, because canonical bytes nest less deeply than settings."""
    # Turn every container into names and values, so that one rule orders all of them.
    if is_dataclass(value):
        inside = {item.name: getattr(value, item.name) for item in fields(value)}
        for entry in declared(type(value)).values():
            if entry.setting.added_later and inside[entry.attribute] == entry.default:
                del inside[entry.attribute]
    elif isinstance(value, Mapping):
        inside = {str(_plain(key)): item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        inside = {str(index): item for index, item in enumerate(value)}
    elif isinstance(value, frozenset):
        inside = {str(_plain(item)): True for item in value}
    else:
        yield [*path, _plain(value)]
        return
    for name, item in inside.items():
        yield from _leaves(item, *path, name)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or (isinstance(value, int) and abs(value) <= MAX_INTEGER):
        return value
    # A setting may also be an integer of any size, or a path with bytes that are not text.
    return encodable(str(value))
