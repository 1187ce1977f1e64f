"""Settings that are absolute paths: a daemon has no working directory that an operator could know."""

from pathlib import Path
from typing import Any, Final

from gpulease.protocol.settings_reader import Setting, must_be

_WHAT: Final = "an absolute path"


def path_setting(does: str, example: str, *, is_reloaded: bool = False) -> Setting:
    """Return the annotation of a setting that is a path."""
    return Setting(does, what=_WHAT, read=read_absolute_path, example=f'"{example}"', is_reloaded=is_reloaded)


def read_absolute_path(value: Any) -> Path:
    """Return an absolute path. Raises BadSetting."""
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise must_be(_WHAT, value)
    return Path(value)
