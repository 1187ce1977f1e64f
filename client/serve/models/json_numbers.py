"""Inputs and outputs as JSON numbers: their conversion, and limits that are checked before a body is parsed.

An item is an array of `input_bytes` divided by the size of `input_type` numbers; several items are an array of such
arrays. Numbers are packed little-endian, each rounded to the nearest value of its type. JSON (RFC 8259, 6) has neither
NaN nor infinities. A number is refused if it would become one of these, or if its type can't represent it.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from gpulease.client.texts import parse_problem
from gpulease.protocol.foreign_text import shortened

FORMATS: Final = {
    "f16": "e",
    "f32": "f",
    "f64": "d",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
}
"""The types of numbers, and their letters in the module `struct`."""

MAX_NUMBERS: Final = 1 << 18
"""Maximum number of numbers in a request, and in its reply, so that one body does not delay other requests: parsing a
number takes 0.1 us, and a number takes 32 bytes in Python."""

MAX_NUMBER_CHARS: Final = 32
"""Maximum number of characters of a body per number. A 64-bit float has at most 24, with a comma and a space 26."""

_SHOWN_CHARS: Final = 40


class NumbersRefused(ValueError):
    """The numbers do not fit the model. The message is a sentence for the client."""


def size_of(kind: str) -> int:
    """Return the bytes of one number of a type in FORMATS."""
    return struct.calcsize(f"<{FORMATS[kind]}")


def parsed_input(body: bytes, max_items: int, numbers: int) -> Any:
    """Parse `{"input": ...}` with at most `max_items` items of `numbers` numbers, for `pack`. Raises NumbersRefused.

    Commas and brackets are counted before parsing, because they limit the memory of the parsed body.
    """
    max_numbers = min(max_items * numbers, MAX_NUMBERS)
    if body.count(b",") >= max_numbers or body.count(b"[") > 1 + max_items or body.count(b"{") > 1:
        raise NumbersRefused(f"It has more than {max_numbers} numbers, or arrays in the items.")
    try:
        document = json.loads(body, parse_constant=_no_number)
    except NumbersRefused:
        raise
    except (ValueError, RecursionError) as error:
        raise NumbersRefused(f"It must be JSON: {parse_problem(error)}.") from None
    if not isinstance(document, dict) or document.keys() != {"input"} or not isinstance(document["input"], list):
        raise NumbersRefused('It must be an object with one array, "input", or with "input_base64".')
    return document["input"]


def pack(value: list[Any], kind: str, numbers: int) -> bytes:
    """Pack one item, or an array of items, into the bytes that a kernel reads. Raises NumbersRefused."""
    # One item: a flat array. Several: an array of arrays.
    if not value or not isinstance(value[0], list):
        return _packed(value, kind, numbers, "The input")
    for at, item in enumerate(value):
        if not isinstance(item, list):
            raise NumbersRefused(f"Item {at} must be an array like the others.")
    return b"".join(_packed(item, kind, numbers, f"Item {at}") for at, item in enumerate(value))


def unpack(payload: bytes, kind: str, numbers: int, *, is_several: bool) -> list[Any]:
    """Return outputs as numbers: one item's, or an array per item. Raises NumbersRefused for NaN or infinity."""
    # Read little-endian numbers, as the kernel writes them.
    values = struct.unpack(f"<{len(payload) // size_of(kind)}{FORMATS[kind]}", payload)
    if not all(map(math.isfinite, values)):
        raise NumbersRefused("The output has NaN or infinity, which JSON can't represent: use base64 or bytes.")
    return [list(values[at : at + numbers]) for at in range(0, len(values), numbers)] if is_several else list(values)


def _packed(item: Sequence[Any], kind: str, numbers: int, label: str) -> bytes:
    if len(item) != numbers:
        raise NumbersRefused(f"{label} must have {numbers} numbers, not {len(item)}.")
    try:
        # struct accepts a bool as an integer, and infinity (Python's value of 1e999) as a float.
        if not any(type(number) is bool for number in item) and all(map(math.isfinite, item)):
            return struct.pack(f"<{numbers}{FORMATS[kind]}", *item)
    except (TypeError, ValueError, OverflowError, struct.error):
        pass
    # The whole item failed: find the number for the message. This slow path is only for errors.
    at = next(at for at, number in enumerate(item) if not _fits(number, kind))
    raise NumbersRefused(f"{label}: value {at} must be {kind}, not {_shown(item[at])}.")


def _fits(number: Any, kind: str) -> bool:
    try:
        struct.pack(f"<{FORMATS[kind]}", number)
        return type(number) is not bool and math.isfinite(number)
    except (TypeError, ValueError, OverflowError, struct.error):
        return False


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return shortened(text, _SHOWN_CHARS)


def _no_number(text: str) -> NoReturn:
    raise NumbersRefused(f"{text} is not a JSON number.")
