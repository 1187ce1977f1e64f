"""Reads untrusted JSON files: size limits, type checks of members, and errors that name the file and the member."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.library_errors import rejected
from gpulease.client.http.settings_file import open_regular
from gpulease.client.numbers import is_number
from gpulease.client.texts import parse_problem, quoted

MAX_JSON_BYTES: Final = 16 << 20
"""Maximum size in bytes of a JSON file other than a tokenizer. Without a limit, its Python objects could fill the
host's memory."""


def quoted_value(value: Any) -> str:
    """Return a value of a file as a quoted text of limited length, for an error."""
    try:
        return quoted(str(value))
    except RecursionError:
        return "'lists in lists'"


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises ModelRejected if it can't be read or has more than `max_bytes` bytes."""
    try:
        with open_regular(path) as file:
            # Read one byte more than allowed instead of trusting the file's size, which may change.
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelRejected(f"{path}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ModelRejected(f"{path}: more than {max_bytes:,} bytes, the most that such a file may have")
    return data


def json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelRejected."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{path}: must be JSON: {parse_problem(error)}") from None
    if not isinstance(value, dict):
        raise ModelRejected(f"{path}: must be a JSON object")
    return value


class Members:
    """The members of an object in a file, each of which is type-checked when it is read."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """Wrap an object, or GGUF's metadata. `where` is the path of the file, for errors."""
        self.values = values
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer. Raises ModelRejected for another type, or if the member is missing and has no default.

        An integer that is too large for a float is refused, too, so callers may compute with floats.
        """
        value = self._value(key, default)
        # bool is a subclass of int in Python, but `true` is not a number in JSON.
        if not is_number(value) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not is_number(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def object(self, key: str) -> "Members | None":
        """Return the members of a nested object; None if the object is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        # Errors in the nested object name its path within the file.
        return Members(value, f"{self.where}: {key}")

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return token ids, which a file may write as one number or as a list; () if there are none."""
        value = self.values.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
            raise self._wrong(key, value, "a token id")
        return tuple(values)

    def items(self, key: str) -> list[Any]:
        """Return a list; [] if it is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value or []

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelRejected(f"{self.where}: {key} is missing")
        return value

    def _wrong(self, key: str, value: Any, kind: str) -> ModelRejected:
        return ModelRejected(f"{self.where}: {key} must be {kind}, not {quoted_value(value)}")


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal. Raises ModelRejected."""
    with rejected(ModelRejected, f"{path}: can't be read"), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of lines `DIGEST  NAME`, as sha256sum prints them, sorted by name. Raises ModelRejected."""
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in sorted(paths, key=lambda path: path.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
