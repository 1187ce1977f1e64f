"""Sizes as people write them in settings, on command lines and in programs, and as texts for people."""

import re
from typing import Final

from gpulease.protocol.counts import counted

MAX_SIZE_DIGITS: Final = 18
"""Maximum number of digits before a size's point, and after it. More digits are a mistake."""

_SIZE: Final = re.compile(
    rf"(\d{{1,{MAX_SIZE_DIGITS}}}(?:\.\d{{1,{MAX_SIZE_DIGITS}}})?)\s*(|[KMGT]I?B?|B)", re.IGNORECASE | re.ASCII
)
_SCALE: Final = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of "6GiB", "512M" or "1073741824"; all units are powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        # The number may have a point, as in 1.5GiB; only the unit's first letter decides.
        raise ValueError(f"{text!r} is not a size: write a number of bytes, or one with KiB, MiB, GiB or TiB")
    size = int(float(match[1]) * _SCALE[match[2][:1].upper()])
    if size < 1:
        raise ValueError(f"{text!r} is not a size: it must be at least one byte")
    return size


def size_text(size_bytes: int) -> str:
    """Return a number of bytes for people: the exact figure, and from one MiB on also a rounded one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= scale:
            return f"{size_bytes} bytes ({size_bytes / scale:.1f} {unit})"
    return counted(size_bytes, "byte")
