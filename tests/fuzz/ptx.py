"""The embedded driver's reader of PTX: daemon/ptx/parse, and its translation, daemon/ptx/translate.

The invariant. Whatever text a tenant loads:

- it becomes intermediate code for a compiler, or is refused with ImageRejected, which has a reason. No other error is
  raised, not even because of the depth of Python's stack;
- the time and the memory that it takes grow at most linearly with its length;
- a refusal is short: a message of limited length, and a line of the text.
"""

import random
import time
from collections.abc import Iterator

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.image import _decode
from gpulease.daemon.ptx.limits import MAX_IR_LINES
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate.call_graph import link
from gpulease.daemon.ptx.translate.module import ModulePart, translate

from . import ptx_texts

MAX_BYTES = 8192
SECONDS = 5.0
"""Limit of this thread's own CPU time, also with the fuzzer's instrumentation. 8 KiB of real PTX take 0.05 s."""

MAX_MESSAGE_CHARS = 2000


def check(data: bytes) -> None:
    begun_s = time.thread_time()
    parts = translated(data)
    assert time.thread_time() - begun_s < SECONDS
    for part in parts or ():
        assert part.text.count("\n") < MAX_IR_LINES


def translated(data: bytes) -> list[ModulePart] | None:
    """Return an image's code, or None if it was refused with a valid ImageRejected."""
    try:
        return translate(link(parse(_decode(data))))
    except ImageRejected as error:
        assert 0 < len(str(error)) <= MAX_MESSAGE_CHARS
        assert len(error.log) <= MAX_MESSAGE_CHARS
        assert 0 <= error.line <= data.count(b"\n") + 1
        return None


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Usually change words and lines, sometimes bytes."""
    if random.Random(seed).random() < 0.2:
        from atheris import Mutate

        return bytes(Mutate(data, max_size))
    return ptx_texts.mutate(data, max_size, seed)


def seeds() -> Iterator[bytes]:
    yield from ptx_texts.seeds()
