"""What somebody may have meant who wrote a word that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: object, known: Iterable[str], otherwise: str = "known are {known}") -> str:
    """Return "did you mean 'driver'?", or without a word that is close `otherwise`, with {known} replaced."""
    words = list(known)
    close = get_close_matches(word, words, n=1) if isinstance(word, str) else []
    return f"did you mean {close[0]!r}?" if close else otherwise.format(known=", ".join(words))
