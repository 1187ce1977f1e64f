"""A disk of some megabytes that a test can fill and empty (tmpfs(5))."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SIZE_BYTES: Final = 64 << 20
"""Enough for an hour's journal, which keeps a row for each lease that ended recently."""

PART_BYTES: Final = 4096


class SmallDisk:
    """A new file system. Mounting it needs root. Use it as a context manager: afterwards it is gone.

    Attributes:
        folder: The mount point. Its path is short, because a Unix socket's path has at most 107 bytes.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpul-", dir="/tmp"))
        self._filler = self.folder / "filler"

    def __enter__(self) -> "SmallDisk":
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=0700", "small_disk", str(self.folder)]
        subprocess.run(words, check=True, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, timeout=60)
        self.folder.rmdir()

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(PART_BYTES)):
                pass
        assert not os.statvfs(self.folder).f_bavail

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
