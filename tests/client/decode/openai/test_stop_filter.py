"""A text ends before its first stop, or after it: the result does not depend on the pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.openai.stop_filter import StopFilter

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str], *, includes_stop: bool = False) -> str:
    """Return the text, read letter by letter, up to the first stop that is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: end if includes_stop else min(begins)]
    return text


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_it_is_the_whole_text_s_cut_however_it_comes(
    text: str, stops: list[str], at: list[int], includes_stop: bool
) -> None:
    places = sorted({0, len(text), *(place for place in at if place < len(text))})
    filtered, wanted = StopFilter(stops, includes_stop=includes_stop), cut(text, stops, includes_stop=includes_stop)
    given_text = ""
    for begin, end in pairwise(places):
        given_text += filtered.add(text[begin:end])
        assert wanted.startswith(given_text)
    rest = filtered.end()
    assert given_text + rest == wanted
    assert filtered.is_stopped == any(stop in text for stop in stops)


@given(LETTERS, STOPS)
def test_it_holds_back_less_than_a_stop(text: str, stops: list[str]) -> None:
    filtered = StopFilter(stops)
    given_text = "".join(map(filtered.add, text))
    assert filtered.is_stopped or len(text) - len(given_text) < max([1, *map(len, stops)])


def test_nothing_comes_behind_a_stop() -> None:
    filtered = StopFilter(["ab"])
    assert [filtered.add("xa"), filtered.add("bc"), filtered.add("d"), filtered.end()] == ["x", "", "", ""]
