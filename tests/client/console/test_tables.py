"""Text of other tenants on a terminal: escaped, and in straight columns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.console.tables import fit, pad, shown, table, width_of


@pytest.mark.parametrize(
    ("text", "as_shown", "width"),
    [
        ("ann", "ann", 3),
        ("\x1b[2J\r\n\x07", "\\x1b[2J\\r\\n\\x07", 15),
        ("\x9b31m", "\\x9b31m", 7),
        ("a\u202eb", "a\\u202eb", 8),
        ("a\u200bb", "a\\u200bb", 8),
        ("e\u0301", "é", 1),
        ("x\u0334", "x\\u0334", 7),
        ("\ud800", "\\ud800", 6),
        ("\u2028", "\\u2028", 6),
        ("試験", "試験", 4),
        ("🙂", "🙂", 2),
    ],
)
def test_what_is_shown(text: str, as_shown: str, width: int) -> None:
    assert shown(text) == as_shown
    assert width_of(as_shown) == width


@given(st.text(), st.integers(0, 12))
def test_shown_text_is_one_printable_line_of_its_width(text: str, width: int) -> None:
    line = shown(text)
    assert line.isprintable()
    assert width_of(fit(line, width)) <= width
    assert width_of(pad(line, width)) == width_of(pad(line, width, right=True)) == width


def test_what_does_not_fit_says_so() -> None:
    assert [fit("試験1", width) for width in (5, 4, 3, 2, 1, 0)] == ["試験1", "試+", "試+", "+", "+", ""]


def test_columns_stay_straight() -> None:
    rows = [["試験", "12", "x"], ["\x1b[2J", "-", ""]]
    assert table(["who", "n", ""], rows) == "who       n\n試験     12  x\n\\x1b[2J   -"
