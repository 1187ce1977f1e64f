"""The TOML files of servers' settings, read once, and the tables `[models.NAME]` of a gateway and a model server."""

import errno
import os
import stat
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, TypeVar

from gpulease.client.errors import InvalidRequest
from gpulease.protocol.settings_reader import BadSetting, read_settings, read_values

MAX_MODELS: Final = 256
"""Most models. Stops a file from filling the server's memory, and the metrics, which have series for each model."""

MAX_SETTINGS_BYTES: Final = 1 << 20
"""Most bytes of a file of settings. Stops a wrong path from filling memory."""

Settings = TypeVar("Settings")


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it. Raises OSError where there is none, or the path is of something else.

    A FIFO would wait for its writer, and a device has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a folder, a FIFO or a device; there must be a file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> dict[str, Any]:
    """Return a file's settings, unchecked. Raises InvalidRequest that says what is wrong, or in which line."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_SETTINGS_BYTES + 1)
        if len(data) > MAX_SETTINGS_BYTES:
            raise InvalidRequest(f"{path} must have at most {MAX_SETTINGS_BYTES} bytes to be a settings file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: {error}") from None


def settings_of(path: Path, kind: type[Settings], table: Any, *keys: str) -> Settings:
    """Return the settings of a file's table, which lies under these keys. Raises InvalidRequest."""
    try:
        return read_settings(kind, table)
    except BadSetting as error:
        raise InvalidRequest(f"{path}: {error.within(*keys)}") from None


def values_of(path: Path, kind: type, table: Any, *keys: str) -> dict[str, Any]:
    """Return the values of a file's table by the attributes of their declaration. Raises InvalidRequest."""
    try:
        return read_values(kind, table)
    except BadSetting as error:
        raise InvalidRequest(f"{path}: {error.within(*keys)}") from None


def read_model_tables(path: Path) -> dict[str, Any]:
    """Return each table, unchecked, by its name. Raises InvalidRequest that says what is wrong in the file."""
    settings = read_file(path)
    tables = settings.pop("models", None)
    if settings or not isinstance(tables, dict) or not 0 < len(tables) <= MAX_MODELS:
        raise InvalidRequest(f"{path}: there must be 1 to {MAX_MODELS} tables [models.NAME], and nothing else")
    return tables
