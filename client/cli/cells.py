"""Text in a terminal's cells: how wide it is, and none of it that the terminal would obey.

What tenants, kernels and daemons say is shown to whoever looks after a node. A control character in it could clear the
screen, forge a line or set the terminal's title (CWE-150), so whatever is not plainly printable is shown as its escape.
"""

import unicodedata
from typing import Final

_MARKS: Final = ("Mn", "Mc", "Me")
"""Categories that take no cell of their own, or one by the font (Unicode Standard, chapter 4.5)."""

_JOINING: Final = range(0x1160, 0x1200)
"""Hangul vowels and finals: they join what is before them on some terminals and stand alone on others."""


def shown(text: str) -> str:
    """Text as one line of printable characters whose widths terminals agree on; what is not is escaped, as in Python.

    Bidirectional controls and zero-width characters are not printable either: they would hide or reorder others.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(mark if _is_plain(mark) else _escape(mark) for mark in unicodedata.normalize("NFC", text))


def _is_plain(mark: str) -> bool:
    return mark.isprintable() and unicodedata.category(mark) not in _MARKS and ord(mark) not in _JOINING


def _escape(mark: str) -> str:
    return mark.encode("unicode_escape").decode("ascii")


def width_of(text: str) -> int:
    """Cells that shown text takes: two for what East Asian fonts draw wide (Unicode Standard Annex 11)."""
    if text.isascii():
        return len(text)
    return sum(_cells(mark) for mark in text)


def _cells(mark: str) -> int:
    return 2 if unicodedata.east_asian_width(mark) in "WF" else 1


def fit(text: str, width: int) -> str:
    """Shown text cut to so many cells; a `+` says that something is missing."""
    if width_of(text) <= width:
        return text
    kept, used = [], 0
    for mark in text:
        used += _cells(mark)
        if used > width - 1:
            break
        kept.append(mark)
    return "".join(kept) + "+" if width > 0 else ""


def wrap(text: str, width: int) -> list[str]:
    """Shown text in lines of at most so many cells, broken at spaces, or within a word that is wider than a line.

    A line is never less than one character, however narrow it is to be.
    """
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and width_of(line) + 1 + width_of(word) <= width:
            line += f" {word}"
            continue
        lines += [line] if line else []
        *pieces, line = _pieces(word, width)
        lines += pieces
    return [*lines, line] if line else lines


def _pieces(word: str, width: int) -> list[str]:
    pieces, used = [""], 0
    for mark in word:
        if pieces[-1] and used + _cells(mark) > width:
            pieces.append("")
            used = 0
        pieces[-1] += mark
        used += _cells(mark)
    return pieces


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Shown text in exactly so many cells, flushed left or right."""
    text = fit(text, width)
    space = " " * (width - width_of(text))
    return space + text if right else text + space
