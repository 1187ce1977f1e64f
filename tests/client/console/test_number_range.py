"""Numbers on a command line are finite and within their bounds."""

import click
import pytest

from gpulease.client.console.number_range import NumberRange


def test_a_number_within_the_bounds() -> None:
    assert NumberRange(min=0.5, max=2).convert("1e0", None, None) == 1.0


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-inf", "1e999", "3", "0.4", "x", ""])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        NumberRange(min=0.5, max=2).convert(text, None, None)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_number_without_bounds_is_finite(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a finite number"):
        NumberRange().convert(text, None, None)
