"""TOML files with servers' settings, read at the start, and their tables `[models.NAME]`, one for each model."""

import errno
import os
import stat
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, TypeVar

from gpulease.client.errors import InvalidRequest
from gpulease.client.texts import parse_problem
from gpulease.protocol.settings_reader import BadSetting, read_settings, read_values

MAX_MODELS: Final = 256
"""Maximum number of models of one server. Each takes memory and has its own series in the metrics."""

MAX_SETTINGS_BYTES: Final = 1 << 20
"""Maximum number of bytes of a settings file, so that a wrong path can't fill memory."""

Settings = TypeVar("Settings")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError if it does not exist or is not a regular file.

    Opening a FIFO would wait for its writer, and reading a device might never end.
    """
    # Use O_NONBLOCK, so that opening a FIFO does not wait. Then check the opened file, which can't be replaced.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it must be a regular file, not a folder, a FIFO or a device")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> dict[str, Any]:
    """Return a file's settings, unchecked. Raises InvalidRequest, which names the line of a syntax error."""
    try:
        with open_regular(path) as file:
            # Read one byte more than allowed, to notice a file that is too large.
            data = file.read(MAX_SETTINGS_BYTES + 1)
        if len(data) > MAX_SETTINGS_BYTES:
            raise InvalidRequest(f"{path}: a settings file must have at most {MAX_SETTINGS_BYTES} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: {parse_problem(error)}") from None


def settings_of(path: Path, kind: type[Settings], table: Any, *keys: str) -> Settings:
    """Return the checked settings of a file's table. `keys` lead to the table, for errors. Raises InvalidRequest."""
    try:
        return read_settings(kind, table)
    except BadSetting as error:
        raise InvalidRequest(f"{path}: {error.within(*keys)}") from None


def values_of(path: Path, kind: type, table: Any, *keys: str) -> dict[str, Any]:
    """Return the checked values of a file's table, by attribute of `kind`. Raises InvalidRequest."""
    try:
        return read_values(kind, table)
    except BadSetting as error:
        raise InvalidRequest(f"{path}: {error.within(*keys)}") from None


def read_model_tables(path: Path) -> dict[str, Any]:
    """Return the tables `[models.NAME]`, unchecked, by their names. Raises InvalidRequest."""
    # Refuse anything other than [models.NAME], such as a setting outside of its table.
    settings = read_file(path)
    tables = settings.pop("models", None)
    if settings or not isinstance(tables, dict) or not 0 < len(tables) <= MAX_MODELS:
        raise InvalidRequest(f"{path} must contain 1 to {MAX_MODELS} tables [models.NAME], and nothing else")
    return tables
