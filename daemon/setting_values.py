"""What a setting's value may be, as people write it; which setting is read how is said in `config`.

Each function raises ValueError, with a clause that says what is wrong.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from gpulease.daemon.core import Cause, CoreLimits
from gpulease.daemon.core.limits import DEFAULT_GRACE_MS
from gpulease.daemon.sandbox.measures import Measure
from gpulease.daemon.sandbox.settings import ALWAYS_ON
from gpulease.daemon.tenant_names import check_tenant

MAX_UID: Final = 2**32 - 2
"""The largest number of a user (credentials(7)); the one above says "none"."""

MAX_WHOLE: Final = 2**31 - 1
"""Of a count, of seconds or of milliseconds: more is a typing mistake, and as nanoseconds could be past what a clock,
a page or a socket option holds."""

_UID: Final = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)
_OCTAL: Final = re.compile("(?:0o?)?[0-7]{3}", re.ASCII)

Choice = TypeVar("Choice", bound=Enum)


def whole(name: str, value: Any) -> int:
    """A number of something, called `name` in what is said of it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value > MAX_WHOLE:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_WHOLE}")
    return value


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def texts(value: Any) -> list[str]:
    """Some strings, or one."""
    if not isinstance(value, str | list):
        raise ValueError("it must be a string or a list of strings")
    found = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in found):
        raise ValueError("it must be a string or a list of strings")
    return found


def member(kind: type[Choice], value: Any) -> Choice:
    """One of an enumeration's values."""
    if value not in {choice.value for choice in kind}:
        raise ValueError(f"{value!r} is none of {', '.join(choice.value for choice in kind)}")
    return kind(value)


def measure(text: str) -> Measure:
    """A measure of the sandbox that can be done without."""
    known = [measure.value for measure in Measure if measure not in ALWAYS_ON]
    if text not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return Measure(text)


def file_mode(value: Any) -> int:
    """Permission bits, of text or of a number."""
    is_octal = isinstance(value, str) and _OCTAL.fullmatch(value) is not None
    mode = int(value, 8) if is_octal else -1 if isinstance(value, str) else whole("socket_mode", value)
    if not 0 <= mode <= 0o777:
        raise ValueError(f'{value!r} is not a file mode: write it as "0660" or 0o660')
    return mode


def absolute_path(value: Any) -> Path:
    """A file's or folder's."""
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return Path(value)


def user_name(value: Any) -> str:
    """A local user's; whether there is one is seen when it is used."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not the name of a user")
    return value


def tenants_of_users(table: Any) -> Mapping[int, str]:
    """Tenants by the numbers of local users."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    for uid, tenant in table.items():
        if _UID.fullmatch(uid) is None or int(uid) > MAX_UID:
            raise ValueError(f"{uid!r} is not a user's number")
        check_tenant(tenant)
    return MappingProxyType({int(uid): tenant for uid, tenant in table.items()})


def core_limits(table: Any) -> CoreLimits:
    """The lease table's bounds, those that are not given as they are by default."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    settings = dict(table)
    _check_names(settings, [item.name for item in fields(CoreLimits) if item.name != "tenants"])
    graces = settings.pop("grace_ms", {})
    if not isinstance(graces, dict):
        raise ValueError("grace_ms must be a table")
    _check_names(graces, [cause.value for cause in Cause])
    graces = {Cause(cause): whole(f"grace_ms.{cause}", ms) for cause, ms in graces.items()}
    bounds: dict[str, Any] = {name: whole(name, bound) for name, bound in settings.items()}
    if graces:
        bounds["grace_ms"] = {**DEFAULT_GRACE_MS, **graces}
    return CoreLimits(**bounds)


def _check_names(table: dict[str, Any], known: list[str]) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"there is no {name!r}; known are {', '.join(known)}")
