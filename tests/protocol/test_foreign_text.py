import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.foreign_text import encodable, printable, shortened


@pytest.mark.parametrize(
    ("text", "as_shown"),
    [
        ("größe, 試験 🙂", "größe, 試験 🙂"),
        ("a\nforged line", "a\\nforged line"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, as_shown: str) -> None:
    assert printable(text) == as_shown


def test_a_caller_may_keep_some_characters_and_replace_the_others() -> None:
    assert printable("a\tb\nc", allowed="\t", instead="?") == "a\tb?c"


@given(st.text())
def test_printable_text_is_printable(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text, instead=" ")) == len(text)


def test_a_text_is_cut_to_its_limit_with_the_ellipsis_counted() -> None:
    assert [shortened("abcde", most_chars) for most_chars in (6, 5, 4)] == ["abcde", "abcde", "abc…"]


def test_a_lone_surrogate_can_be_encoded() -> None:
    assert encodable("a\udcffb").encode() == b"a\\udcffb"
