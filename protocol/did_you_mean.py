"""Suggests the known word that is most similar to a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: object, names: Iterable[str], otherwise: str = "known are {known}") -> str:
    """Return "did you mean 'driver'?", or, without a similar word, `otherwise` with {known} replaced."""
    words = list(names)
    # A file's key or a JSON value may be of any type, but only text can be misspelt.
    close = get_close_matches(word, words, n=1) if isinstance(word, str) else []
    return f"did you mean {close[0]!r}?" if close else otherwise.format(known=", ".join(words))
