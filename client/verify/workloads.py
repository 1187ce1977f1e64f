"""Different work in several sessions at the same time, each result checked."""

import threading
import time
from collections.abc import Callable
from typing import Final

from gpulease.client import GpuLeaseError, GpuSession
from gpulease.client.bench.kernels import Prepared, kernels_ptx, works
from gpulease.client.verify.kernels import count_set, fill, rule_breakers
from gpulease.client.verify.scene import Breach

WORK_S: Final = 0.5
"""For so long all of them compute at the same time."""

END_S: Final = 30.0
"""For a round that is under way to end, on a host that has one core for all of them."""

WORDS: Final = 1 << 18

Round = Callable[[], None]


def at_the_same_time(sessions: list[GpuSession]) -> int:
    """One kind of work in each session for a while; how many rounds they did in all. Raises Breach."""
    rounds = [make(session) for make, session in zip(_KINDS, sessions, strict=True)]
    done = [0] * len(rounds)
    wrong: list[str] = []
    until = time.monotonic() + WORK_S

    def repeat(number: int) -> None:
        try:
            while not done[number] or time.monotonic() < until:
                rounds[number]()
                done[number] += 1
        except (Breach, GpuLeaseError) as error:
            wrong.append(f"tenant {number + 1}: {error}")

    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(rounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    if wrong or not all(done):
        raise Breach("; ".join(wrong) or f"a tenant did not end a round in {END_S:g} s")
    return sum(done)


def _kernel(name: str) -> Callable[[GpuSession], Round]:
    """A kernel of the bench, its result beside numpy's."""

    def make(session: GpuSession) -> Round:
        return Prepared(session, session.module_load(kernels_ptx()), works()[name]).check

    return make


def _counting(session: GpuSession) -> Round:
    """Writes memory and counts what it wrote."""
    module, buffer = session.module_load(rule_breakers()), session.mem_alloc(4 * WORDS)

    def fill_and_count() -> None:
        fill(session, module, buffer, WORDS, 1)
        found = count_set(session, module, buffer, WORDS)
        fill(session, module, buffer, WORDS, 0)
        if found != WORDS or count_set(session, module, buffer, WORDS):
            raise Breach(f"{found} of {WORDS} words were counted")

    return fill_and_count


def _renewing(session: GpuSession) -> Round:
    """Takes memory, which must be zero, uses it and gives it back."""
    module = session.module_load(rule_breakers())

    def take_and_free() -> None:
        buffer = session.mem_alloc(4 * WORDS)
        if count_set(session, module, buffer, WORDS):
            raise Breach("memory given anew is not zero")
        fill(session, module, buffer, WORDS, 7)
        session.mem_free(buffer)

    return take_and_free


_KINDS: Final = (*map(_kernel, ("matmul", "saxpy", "softmax", "layernorm")), _counting, _renewing)
