"""Makes foreign text safe for a log, a report or a terminal.

A control character could clear the screen, forge a line or set the terminal's title (CWE-150). A bidirectional
character could make a terminal display a line in another order.
"""


def printable(text: str, *, allowed: str = "", instead: str | None = None) -> str:
    """Return text with every character replaced that `str.isprintable` refuses.

    Args:
        text: Any text; lone surrogates are replaced, too.
        allowed: Characters that stay unchanged.
        instead: The replacement of each other character; None for its escape.
    """
    # Test the whole text first. Nearly every text is printable, and this test runs in C, the replacement in Python.
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() or mark in allowed else escape(mark) if instead is None else instead for mark in text
    )


def escape(mark: str) -> str:
    r"""Return a character as Python's source writes it: `\n`, `\x1b`, `\u202e`."""
    # The codec writes a lone surrogate as \udcff too, so nothing in its result needs another escape.
    return mark.encode("unicode_escape").decode("ascii")


def shortened(text: str, most_chars: int) -> str:
    """Return text of at most `most_chars` characters. The last character of a text that was cut is an ellipsis."""
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates, which paths and certificates may contain, are escaped."""
    return text.encode(errors="backslashreplace").decode()
