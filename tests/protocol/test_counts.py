"""Numbers of things in sentences, and words that are close to known ones."""

import pytest

from gpulease.protocol.counts import counted
from gpulease.protocol.did_you_mean import did_you_mean


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (0, ("lease",), "0 leases"),
        (1, ("lease",), "1 lease"),
        (2, ("lease is", "leases are"), "2 leases are"),
        (1, ("lease is", "leases are"), "1 lease is"),
    ],
)
def test_one_is_singular(number: int, words: tuple[str, ...], said: str) -> None:
    assert counted(number, *words) == said


def test_a_word_that_is_close_is_named_and_else_all_are() -> None:
    known = ("auto", "cuda", "cpu")
    assert did_you_mean("cudaa", known) == "did you mean 'cuda'?"
    assert did_you_mean("metal", known) == "known are auto, cuda, cpu"
    assert did_you_mean(["cuda"], known, "there are {known}") == "there are auto, cuda, cpu"
    assert did_you_mean("metal", known, "") == ""
