"""PTX for the targets that read it: seeds, and mutations that a parser does not refuse at once."""

import random
import re
from collections.abc import Iterator
from functools import cache

from .vector_seeds import ptx_texts

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
MAX_SEED_BYTES = 6000
_TOKEN = re.compile(r"\s+|[.%$\w]+|.", re.DOTALL)
_LITERALS = (
    "0", "1", "-1", "2", "4", "16", "32", "48", "64", "255", "1024", "4096", "65536", "49152", "0xFFFFFFFF",
    "18446744073709551615", "0f3F800000", "0fFFFFFFFF", "0d0000000000000000", "4294967296", "99999999",
)  # fmt: skip


def seeds() -> Iterator[bytes]:
    """Yield small texts in full, and each function of a large text with everything outside of functions."""
    for text in ptx_texts(200_000):
        if len(text) <= MAX_SEED_BYTES:
            yield text.encode()
        outside, functions = parts_of(text)
        for function in functions:
            whole = (outside + function).encode()
            if len(whole) <= MAX_SEED_BYTES:
                yield whole


def parts_of(text: str) -> tuple[str, list[str]]:
    """Return what is outside of functions, and all kernels and functions with bodies.

    Debugging sections are left out.
    """
    text = re.sub(r"//[^\n]*", "", text).split(".section")[0]
    functions = re.findall(r"^(?:\.\w+ )*\.(?:entry|func)[^{;]*\{.*?^\}", text, re.MULTILINE | re.DOTALL)
    for function in functions:
        text = text.replace(function, "")
    return re.sub(r"\n\s*\n", "\n", text), functions


@cache
def vocabulary() -> tuple[str, ...]:
    """Return words of real texts, lines of real kernels, and numbers at limits."""
    words: dict[str, None] = {}
    for seed in seeds():
        text = seed.decode()
        words |= dict.fromkeys(_TOKEN.findall(text))
        words |= dict.fromkeys(line + "\n" for line in text.splitlines() if line.endswith(";"))
    return (*words, *_LITERALS)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Return a text after some edits of words and lines. The result is PTX, or nearly."""
    dice = random.Random(seed)
    tokens = _TOKEN.findall(data.decode("utf-8", "replace"))
    lines = "".join(tokens).splitlines(keepends=True)
    if dice.random() < 0.4 and len(lines) > 1:
        edit(lines, dice)
        return "".join(lines).encode()[:max_size]
    edit(tokens, dice)
    return "".join(tokens).encode()[:max_size]


def edit(pieces: list[str], dice: random.Random) -> None:
    words = vocabulary()
    for _ in range(dice.randint(1, 4)):
        at, other = dice.randrange(len(pieces) or 1), dice.randrange(len(pieces) or 1)
        match dice.randrange(6) if pieces else 0:
            case 0:
                pieces.insert(at, dice.choice(words))
            case 1:
                pieces[at] = dice.choice(words)
            case 2:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3:
                pieces[at] = pieces[other]
            case 4:
                del pieces[at : at + dice.randint(1, 3)]
            case _:
                pieces[at:at] = pieces[other : other + dice.randint(1, 8)]
