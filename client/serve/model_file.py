"""Read the TOML file whose tables `[models.NAME]` say what a server of models serves."""

import tomllib
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
