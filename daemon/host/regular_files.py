"""Opens files that an operator names."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError if it does not exist or is not a regular file.

    Opening a FIFO would wait for its writer, so that the daemon could not even be stopped; reading a device might never
    end.
    """
    # Use O_NONBLOCK, so that opening a FIFO does not wait. Then check the opened file, which can't be replaced.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(status: os.stat_result, path: Path) -> None:
    """Raise OSError unless the status is a regular file's."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it must be a regular file, not a folder, a FIFO or a device", str(path))
