"""Atomically replaces files that programs of several users read."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int, *, is_synced: bool = False) -> None:
    """Replace a file, or create it.

    Args:
        path: The file.
        data: Its new contents.
        mode: Its permissions, whatever the umask.
        is_synced: Whether it must be on the disk when this returns.
    """
    # Write a new file and rename it over the old one, so that readers see one of the two files whole. O_EXCL fails on a
    # link that another user may have placed there.
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        # Set the mode again, because the umask may have removed bits when the file was created.
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    new.replace(path)
    # To make the rename durable, sync the folder.
    if is_synced:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the creations, renames and removals in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
