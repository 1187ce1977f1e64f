"""Tables where there is little room: columns go in a defined order, and what still does not fit is stacked.

Nothing in a table is cut: an id that was would be copied as another one.
"""

import os
import sys
from collections.abc import Collection, Sequence
from typing import Final, TextIO

from gpulease.client.cli.cells import shown, width_of, wrap
from gpulease.client.cli.tables import GAP, table

MAX_COLUMNS: Final = 1000
"""Of what the environment says: more is no terminal's width."""

MIN_TEXT: Final = 24
"""Cells of a last column of text, from which on it is read there and not below its row."""

MIN_INDENTED: Final = 12
"""Cells of lines from which on some are indented: below, each is needed."""

_INDENT: Final = "  "


def is_terminal() -> bool:
    """Whether somebody reads the output on a terminal."""
    # None if whoever started this program closed it.
    output: TextIO | None = sys.stdout
    return output is not None and output.isatty()


def output_width() -> int | None:
    """Cells of a line of the output: the terminal's, or what the environment says of a pipe's reader (watch(1) does).

    None where nothing says it: a file, or a program.
    """
    if is_terminal():
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or None
        except OSError:
            return None
    told = os.environ.get("COLUMNS", "")
    return int(told) if told.isascii() and told.isdigit() and 0 < int(told) <= MAX_COLUMNS else None


def fitted(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    title: int = 0,
    spared: Sequence[str] = (),
    texts: Collection[str] = (),
    is_text_last: bool = False,
) -> str:
    """A table in lines of so many cells.

    If it is too wide, its last column is wrapped if that is text; else it does without the columns of `spared`, one
    after the other, until it fits. If it never does, each row is a few lines: its title, and each cell behind its head.

    Args:
        head: Of the columns; "" where a cell says all.
        rows: A cell for each column.
        width: None for as many as it takes.
        title: The column that a stacked row begins with.
        spared: Heads, the first to go first.
        texts: Heads of columns that are never figures, as `table` has them.
        is_text_last: The last column is text for people.
    """
    whole = table(head, rows, texts=texts)
    if width is None or _fits(whole, width):
        return whole
    if is_text_last and (wrapped := _with_text_wrapped(head, rows, width)):
        return wrapped
    left = list(head)
    for name in spared:
        left.remove(name)
        kept = [head.index(one) for one in left]
        narrower = table(left, [[row[index] for index in kept] for row in rows], texts=texts)
        if _fits(narrower, width):
            return narrower
    heading = wrap(shown(head[title]), width) if is_text_last else []
    return "\n".join([*heading, *(_stacked(head, row, width, title, is_text_last=is_text_last) for row in rows)])


def wrapped_text(text: str, width: int | None) -> str:
    """A sentence, in lines of so many cells."""
    return text if width is None else "\n".join(wrap(shown(text), width))


def _fits(text: str, width: int) -> bool:
    return all(width_of(line) <= width for line in text.splitlines())


def _with_text_wrapped(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """The table, or nothing if there is no room for text."""
    # Not splitlines(): it would leave out a last row that is empty but for its text.
    others = table(head[:-1], [row[:-1] for row in rows]).split("\n")
    begin = max(width_of(line) for line in others) + len(GAP)
    if width - begin < MIN_TEXT:
        return ""
    lines = []
    for line, row in zip(others, (head, *rows), strict=True):
        first, *rest = wrap(shown(row[-1]), width - begin) or [""]
        pad = " " * (begin - width_of(line))
        lines += [f"{line}{pad}{first}".rstrip(), *(" " * begin + more for more in rest)]
    return "\n".join(lines)


def _stacked(head: Sequence[str], row: Sequence[str], width: int, title: int, *, is_text_last: bool) -> str:
    """The row's title, then `head cell` pairs, as many a line as fit; text is a paragraph of its own."""
    cells = [(shown(name), shown(cell)) for name, cell in zip(head, row, strict=True)]
    text = cells.pop()[1] if is_text_last else ""
    title_cell = cells.pop(title)[1]
    about = GAP.join([title_cell, *(cell for name, cell in cells if not name and cell)])
    lines = [about] if width_of(about) <= width else wrap(about, width)
    line = ""
    for pair in (f"{name} {cell}" for name, cell in cells if name):
        if line and width_of(line) + len(GAP) + width_of(pair) <= width:
            line += GAP + pair
            continue
        lines += [line] if line else []
        *before, line = _paragraph(pair, width) or [""]
        lines += before
    return "\n".join([*lines, *([line] if line else []), *_paragraph(text, width)])


def _paragraph(text: str, width: int) -> list[str]:
    if width < MIN_INDENTED:
        return wrap(text, width)
    return [_INDENT + line for line in wrap(text, width - len(_INDENT))]
