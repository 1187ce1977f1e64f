"""The canonical bytes of a value: the subset of RFC 8785 (JCS) that the package's docstring states."""

import json
import re
from functools import lru_cache
from types import NoneType
from typing import Any, Final

MAX_INTEGER: Final = 2**53 - 1
"""RFC 8785, section 3.2.2.3: beyond it a reader that holds numbers as doubles would see another one."""

MAX_DEPTH: Final = 8
"""Of objects and arrays inside each other. Stops a forged record from exhausting its reader's stack."""

_KEY: Final = re.compile(r"[A-Za-z0-9_]+")
# Python's encoder escapes exactly what RFC 8785, section 3.2.2.2, does, with the same letters.
_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
).encode


class NotCanonical(ValueError):
    """A value that has no canonical bytes, or bytes that are not canonical; the message says why."""


def canonical_bytes(value: Any, depth: int = 0) -> bytes:
    """A value as bytes: equal values, equal bytes; `depth`: of how many it is inside. Raises NotCanonical."""
    _check(value, MAX_DEPTH - depth)
    try:
        return _encode(value).encode("utf-8")
    except UnicodeEncodeError:
        raise NotCanonical("a text holds half of a surrogate pair") from None


def value_of(data: bytes) -> Any:
    """The value of canonical bytes. Raises NotCanonical for any others, even if they are JSON."""
    try:
        value = json.loads(data, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as error:
        raise NotCanonical(f"it is not JSON: {error}" if not isinstance(error, NotCanonical) else str(error)) from None
    if canonical_bytes(value) != data:
        raise NotCanonical("it is not in canonical form")
    return value


def _no_float(text: str) -> Any:
    raise NotCanonical(f"{text[:32]} is not an integer")


def _check(value: Any, depth: int) -> None:
    """Raises NotCanonical. Members are looked at here, as far as they can be: a call for each takes twice as long."""
    kind = type(value)
    if kind is dict:
        for key in value:
            _check_key(key)
        items = value.values()
    elif kind in (list, tuple):
        items = value
    else:
        items, depth = (value,), depth + 1
    if depth == 0:
        raise NotCanonical(f"objects and arrays are more than {MAX_DEPTH} deep")
    for item in items:
        kind = type(item)
        if kind is int:
            if not -MAX_INTEGER <= item <= MAX_INTEGER:
                raise NotCanonical("an integer is beyond 2^53 - 1")
        elif kind in (dict, list, tuple):
            _check(item, depth - 1)
        elif kind not in (str, bool, NoneType):
            raise NotCanonical(f"a {kind.__name__} has no canonical form")


@lru_cache(maxsize=1024)
def _check_key(key: object) -> None:
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise NotCanonical("a key is not made of ASCII letters, digits and underscores")
