"""Tables, sizes and times as text for people. Cells contain no characters that a terminal interprets.

Names and messages of tenants, kernels and daemons are shown to operators. A control character in them could clear the
screen, forge a line or set the terminal's title (CWE-150). Each character that is not plainly printable is escaped.

A table that is too wide for the terminal drops columns in a defined order; if it still does not fit, its rows are
stacked. Cells are never cut: a shortened id would be copied as another one.
"""

import os
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Final, TextIO

from gpulease.protocol.foreign_text import escape

MISSING: Final = "-"
"""Shown in a cell for which the daemon sends no value."""

GAP: Final = "  "
"""Text between two columns."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Collection[str] = ()) -> str:
    """Lay out a table with columns as wide as their widest cell; columns of figures are aligned right.

    Args:
        head: The columns' titles.
        rows: One cell per column. Unprintable characters are escaped.
        texts: Titles of columns that are never figures, even if their cells begin with digits: ids, names.
    """
    # Work by columns, because a column's width follows from all its cells, its title included.
    columns = [[shown(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    widths = [max(width_of(cell) for cell in column) for column in columns]
    is_number = [name not in texts and _are_figures(column[1:]) for name, column in zip(head, columns, strict=True)]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [pad(cell, width, right=right) for cell, width, right in zip(row, widths, is_number, strict=True)]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)


def _are_figures(cells: Sequence[str]) -> bool:
    # A column of figures has at least one; a missing value does not make it text.
    return any(cell[:1].isdigit() for cell in cells) and all(cell[:1].isdigit() or cell == MISSING for cell in cells)


MIN_TEXT: Final = 24
"""Minimum width of a last column of text, in cells; if there is less, the text goes below its row."""

MIN_INDENTED: Final = 12
"""Minimum width in cells for indented lines; below it, every cell is needed."""

_INDENT: Final = "  "


def fitted(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    title_column: int = 0,
    droppable: Sequence[str] = (),
    texts: Collection[str] = (),
    is_text_last: bool = False,
) -> str:
    """Lay out a table in lines of at most `width` cells.

    If it is too wide, its last column is wrapped if that is text. Otherwise the columns of `droppable` are dropped one
    by one until it fits. If it still does not fit, each row becomes a few lines: its title, then each cell after its
    column's title.

    Args:
        head: Titles of the columns; "" for a column that needs none.
        rows: One cell per column.
        width: The width; None for unlimited.
        title_column: Index of the column whose cell is a stacked row's title.
        droppable: Titles of columns that may be dropped, in this order.
        texts: Titles of columns that are never numeric, as in `table`.
        is_text_last: Whether the last column is text for people.
    """
    full_table = table(head, rows, texts=texts)
    if width is None or _fits(full_table, width):
        return full_table
    # First try to wrap the last column.
    if is_text_last and (wrapped := _with_text_wrapped(head, rows, width)):
        return wrapped
    columns = list(head)
    # Then drop columns, the least useful first.
    for name in droppable:
        columns.remove(name)
        indexes = [head.index(column) for column in columns]
        narrower = table(columns, [[row[index] for index in indexes] for row in rows], texts=texts)
        if _fits(narrower, width):
            return narrower
    # Then stack the rows. If the last column is text, the title column's own title is a line above all rows.
    heading = wrap(shown(head[title_column]), width) if is_text_last else []
    return "\n".join([*heading, *(_stacked(head, row, width, title_column, is_text_last=is_text_last) for row in rows)])


def wrapped_text(text: str, width: int | None) -> str:
    """Wrap a sentence into lines of at most `width` cells."""
    return text if width is None else "\n".join(wrap(shown(text), width))


def _fits(text: str, width: int) -> bool:
    return all(width_of(line) <= width for line in text.splitlines())


def _with_text_wrapped(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return the table with its last column wrapped; "" if it does not fit."""
    # Do not use splitlines(), which would drop a last row that is empty except for its text.
    others = table(head[:-1], [row[:-1] for row in rows]).split("\n")
    begin = max(width_of(line) for line in others) + len(GAP)
    if width - begin < MIN_TEXT:
        return ""
    lines = []
    for line, row in zip(others, (head, *rows), strict=True):
        # The first line is next to the row, and the others are below it with the same indentation.
        first, *rest = wrap(shown(row[-1]), width - begin) or [""]
        pad = " " * (begin - width_of(line))
        lines += [f"{line}{pad}{first}".rstrip(), *(" " * begin + line_rest for line_rest in rest)]
    return "\n".join(lines)


def _stacked(head: Sequence[str], row: Sequence[str], width: int, title_column: int, *, is_text_last: bool) -> str:
    """Lay out the row's title, then `head cell` pairs, as many per line as fit. Text is a separate paragraph."""
    cells = [(shown(name), shown(cell)) for name, cell in zip(head, row, strict=True)]
    # A last column of text becomes a paragraph; the title comes first, with cells that need no head.
    text = cells.pop()[1] if is_text_last else ""
    title_cell = cells.pop(title_column)[1]
    heading = GAP.join([title_cell, *(cell for name, cell in cells if not name and cell)])
    lines = [heading] if width_of(heading) <= width else wrap(heading, width)
    line = ""
    # Fill each line with pairs; a pair that is wider than a line becomes a paragraph.
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


MAX_COLUMNS: Final = 1000
"""Largest width that is accepted from the environment: no terminal is wider."""


def is_terminal() -> bool:
    """True if standard output is a terminal: tables then have its width, and commands may draw."""
    # None if the parent closed this program's output.
    output: TextIO | None = sys.stdout
    return output is not None and output.isatty()


def output_width() -> int | None:
    """Return the width of the output in cells; None for a file or a program.

    It is the terminal's width or, for a pipe, COLUMNS, which watch(1) sets for its pipe.
    """
    if is_terminal():
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or None
        except OSError:
            return None
    # Accept only a plausible number: the variable may contain anything.
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isascii() and columns.isdigit() and 0 < int(columns) <= MAX_COLUMNS else None


_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size_text(size_bytes: int) -> str:
    """Return a size in short, rounded to three digits: "1.5 GiB"."""
    # The largest unit that the size reaches; three digits in each.
    for unit, scale in _UNITS:
        if size_bytes >= scale:
            places = 2 if size_bytes < 10 * scale else 1 if size_bytes < 100 * scale else 0
            # Round in integers, half up, as the web page does.
            rounded = (2 * size_bytes * 10**places + scale) // (2 * scale) / 10**places
            return f"{rounded:g} {unit}"
    return f"{size_bytes} B"


def seconds_text(seconds: float) -> str:
    """Return a time span in short: "2 h 05 min", "3 min 20 s", "4.2 s"."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"


_MARKS: Final = ("Mn", "Mc", "Me")
"""Categories of characters that take no cell, or one depending on the font (Unicode Standard, chapter 4.5)."""

_JOINING: Final = range(0x1160, 0x1200)
"""Hangul vowels and finals: some terminals join them to the preceding character, others show them separately."""


def shown(text: str) -> str:
    """Return text as one line of printable characters with well-defined widths; others are escaped, as in Python.

    Bidirectional controls and zero-width characters are escaped, too: they would hide or reorder other characters.
    """
    # In the usual case, no character must be checked by itself.
    if text.isascii() and text.isprintable():
        return text
    return "".join(mark if _is_plain(mark) else escape(mark) for mark in unicodedata.normalize("NFC", text))


def _is_plain(mark: str) -> bool:
    return mark.isprintable() and unicodedata.category(mark) not in _MARKS and ord(mark) not in _JOINING


def width_of(text: str) -> int:
    """The width of shown text in cells: two for characters that East Asian fonts draw wide (Unicode Annex 11)."""
    if text.isascii():
        return len(text)
    return sum(_cells(mark) for mark in text)


def _cells(mark: str) -> int:
    return 2 if unicodedata.east_asian_width(mark) in "WF" else 1


def fit(text: str, width: int) -> str:
    """Cut shown text to `width` cells; a `+` marks the cut."""
    if width_of(text) <= width:
        return text
    # Leave one cell for the mark of the cut.
    chosen, used = [], 0
    for mark in text:
        used += _cells(mark)
        if used > width - 1:
            break
        chosen.append(mark)
    return "".join(chosen) + "+" if width > 0 else ""


def wrap(text: str, width: int) -> list[str]:
    """Break shown text into lines of at most `width` cells, at spaces, or inside a word that is wider than a line.

    A line has at least one character, however narrow it is.
    """
    lines: list[str] = []
    line = ""
    # Fill the line with words; a word that is wider than a line is cut into pieces.
    for word in text.split():
        if line and width_of(line) + 1 + width_of(word) <= width:
            line += f" {word}"
            continue
        # Begin a new line with the word. The pieces of an overlong word fill separate lines.
        lines += [line] if line else []
        *pieces, line = _pieces(word, width)
        lines += pieces
    return [*lines, line] if line else lines


def _pieces(word: str, width: int) -> list[str]:
    pieces, used = [""], 0
    for mark in word:
        # A line has at least one character, even if that is wider than the line.
        if pieces[-1] and used + _cells(mark) > width:
            pieces.append("")
            used = 0
        pieces[-1] += mark
        used += _cells(mark)
    return pieces


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return shown text in exactly `width` cells, aligned left or right."""
    text = fit(text, width)
    space = " " * (width - width_of(text))
    return space + text if right else text + space
