"""Reads JSON that strangers wrote: bounded, its members checked, every failure a sentence that names the file."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gpulease.client.decode.decode_errors import DecodeError, ModelRejected
from gpulease.client.http.settings_file import open_regular
from gpulease.client.texts import quoted

MAX_JSON_BYTES: Final = 16 << 20
"""Most bytes of a JSON file, but a tokenizer's. Stops a file from filling the host's memory as Python objects."""


def quoted_value(value: Any) -> str:
    """Quote a file's own value for an error, as a text."""
    try:
        return quoted(str(value))
    except RecursionError:
        return "'lists in lists'"


@contextmanager
def rejected(kind: type[DecodeError], message: str) -> Iterator[None]:
    """Turn whatever a library raises into an error of ours, except a lack of memory. Its panics are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, DecodeError):
        raise
    except BaseException as error:
        raise kind(f"{message}: {error}") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Return a file's bytes. Raises ModelRejected where there is none, or more than `most`."""
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ModelRejected(f"{path}: {error.strerror}") from None
    if len(data) > most:
        raise ModelRejected(f"{path}: more than {most:,} bytes, the most that such a file may have")
    return data


def json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelRejected."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{path}: must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelRejected(f"{path}: must be a JSON object")
    return value


class Members:
    """The members of an object of a file, each checked as it is read."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """Args: values: The object, or GGUF's metadata. where: The file's path, for errors."""
        self.values = values
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        """An integer. Raises ModelRejected for another value, or for none where there is no default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def object(self, key: str) -> "Members | None":
        """An object; None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Members(value, f"{self.where}: {key}")

    def tokens(self, key: str) -> tuple[int, ...]:
        """Tokens: of one or of a list; () where there is none."""
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
            raise self._wrong(key, value, "a token id")
        return tuple(found)

    def items(self, key: str) -> list[Any]:
        """A list; an empty one where there is none."""
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


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal. Raises ModelRejected."""
    with rejected(ModelRejected, f"{path}: can't be read"), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of lines `DIGEST  NAME`, as sha256sum prints them, sorted by name. Raises ModelRejected."""
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in sorted(paths, key=lambda path: path.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
