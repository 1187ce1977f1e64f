"""The TOML file whose tables `[models.NAME]` describe the models of a server: reading, types, missing settings."""

import tomllib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpulease.client.errors import InvalidRequest

MAX_MODELS: Final = 256
"""Most models. Stops a file from filling the server's memory, and the metrics, which have series for each model."""


def read_model_tables(path: Path) -> dict[str, Any]:
    """Return each table, unchecked, by its name. Raises InvalidRequest that says what is wrong in the file."""
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from None
    tables = text.pop("models", None)
    if text or not isinstance(tables, dict) or not 0 < len(tables) <= MAX_MODELS:
        raise InvalidRequest(f"{path}: there must be 1 to {MAX_MODELS} tables [models.NAME], and nothing else")
    return tables


def check_table(where: str, table: Any) -> None:
    """Raise InvalidRequest unless the value of `[models.NAME]` is a table."""
    if not isinstance(table, dict):
        raise InvalidRequest(f"{where} must be a table")


def kind_of(where: str, key: str, kinds: Mapping[str, type[Any]]) -> type[Any]:
    """Return the type of a setting. Raises InvalidRequest if there is no such setting."""
    if key not in kinds:
        raise InvalidRequest(f"{where}: unknown setting {key!r}; the settings are {', '.join(kinds)}")
    return kinds[key]


def check_kind(where: str, key: str, value: Any, kind: type[Any]) -> None:
    """Raise InvalidRequest unless the value has the setting's type; an integer is a float, too, and a bool neither."""
    is_right = isinstance(value, int | float if kind is float else kind)
    if not is_right or isinstance(value, bool) is not (kind is bool):
        raise InvalidRequest(f"{where}: {key} must be of type {kind.__name__}, not {value!r}")


def check_complete(where: str, table: Container[str], needed: Iterable[str]) -> None:
    """Raise InvalidRequest if a setting without a default is missing."""
    if missing := [key for key in needed if key not in table]:
        raise InvalidRequest(f"{where}: {', '.join(missing)} is missing")
