"""The session's account of the card's time, and the limits on it, for Python and for native code.

This is the Python side of pacing.ll, which contains the rules. Native code begins and ends intervals for what it serves
itself; Python calls the same functions for everything else. Both hold work back before it begins, so that a tenant's
next launches wait in the ring, as they do while the card's queue is full.
"""

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from gpulease.daemon.contract.control_page import MAX_LATENCY_WORDS, PAGE_BYTES, Counter, WorkerPage
from gpulease.daemon.drivers.interface import MAX_MARKS, Context, Poll
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.session import native
from gpulease.daemon.session.native.layout import PacingMark, PacingState
from gpulease.protocol.time_units import NS_PER_S

if TYPE_CHECKING:
    from gpulease.daemon.native.compiler import NativeCode

MEANS: Final = 1024
"""Number of running mean times that a session keeps. If it has more kinds of work, some kinds share a mean, which is
then inaccurate for them."""

MIN_HELD_SLEEP_NS: Final = 50_000
MIN_HELD_SLEEP_S: Final = MIN_HELD_SLEEP_NS / NS_PER_S
"""First sleep while work is held back. The work on the card for which it waits is often this short."""

MAX_HELD_SLEEP_S: Final = 500e-6
"""Longest sleep while work is held back. The lease is checked after each sleep, so a revocation is noticed after this
time at the latest."""

TURN_SPIN_NS: Final = 800_000
"""Native code spins if its next turn begins within this time, because a sleep may end this late. pacing.ll contains the
same number."""

MIN_NAP_S: Final = 100e-6
"""Shortest sleep between two polls of work that no client waits for."""

MAX_NAP_S: Final = 20e-3
"""Longest sleep between two polls of work that no client waits for."""

YOUNG_NS: Final = 3_000_000
"""On a host with cores to spare, native code polls for the end of an interval of work without a sleep until the
interval has this age. At a lower age, a sleep of MIN_NAP_S, plus the time that the host takes to wake the worker, would
be more than 1 / NAPS_PER_INTERVAL of the interval."""

NAPS_PER_INTERVAL: Final = 16
"""A sleep between two polls lasts 1 / NAPS_PER_INTERVAL of the time for which work has been outstanding. The work is
assumed to end in the middle of a sleep, so the measured time is wrong by at most half a sleep: 1/32, in either
direction."""

# A factor that distributes kinds over the means, even if the kinds are addresses.
_SPREAD: Final = 0x9E3779B97F4A7C15
_BUSY_SINCE_NS: Final = int(Counter.BUSY_SINCE_NS)
_IS_MARKED: Final = PacingState.is_marked.offset // 8
_SEEN_NS: Final = PacingState.seen_ns.offset // 8


@cache
def session_code() -> "NativeCode":
    """Compile pacing.ll once per process, with serve.ll on machines that it can serve on. Starts no thread."""
    # Imported here: this needs llvmlite, which only the drivers of workers require.
    from gpulease.daemon.native.code_cache import load_ir

    names = ("pacing.ll", "serve.ll") if platform.machine() == "x86_64" else ("pacing.ll",)
    return load_ir("\n".join(files(native).joinpath(name).read_text("ascii") for name in names))


class _PacingCode:
    """The functions of pacing.ll, by their names, bound once for the process."""

    def __init__(self) -> None:
        code, address, time_ns = session_code(), ctypes.c_void_p, ctypes.c_uint64
        self.begin_work: Callable[[int, int], None] = _bind(code, "begin_work", None, address, time_ns)
        self.poll_work: Callable[[int, int], int] = _bind(code, "poll_work", ctypes.c_int32, address, time_ns)
        self.hold_work: Callable[[int, int], int] = _bind(code, "hold_work", ctypes.c_int32, address, address)
        self.release_work: Callable[[int, int], None] = _bind(code, "release_work", None, address, time_ns)
        self.mark_work: Callable[[int, int], None] = _bind(code, "mark_work", None, address, address)


def _bind(code: "NativeCode", name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    return ctypes.CFUNCTYPE(result, *arguments)(code.address(f"gpulease_{name}"))


@cache
def _pacing_code() -> _PacingCode:
    return _PacingCode()


class Pacer:
    """One session's account of the card's time, and the waits that the limits on this time require.

    Args:
        page: The control page, with the account and the limits.
        context: The driver's context.
        spin_ns: For how long native code may spin while work is held back. With 0 it never spins, not even
            while it waits for the end of work.
    """

    def __init__(self, page: WorkerPage, context: Context, spin_ns: int = 0) -> None:
        self._code = _pacing_code()
        self._counters = page.counters
        self._progress = progress = context.progress()
        # Keep these objects alive, because the state below contains their addresses.
        self._page = page
        self._marks = (PacingMark * MAX_MARKS)()
        self._means = (ctypes.c_uint64 * MEANS)()
        # Two substitutes: a word that is always 0, for each latency word that the session has not received; and a word
        # that no process reads, for the session's own word.
        self._zero_word, self._dummy_own_word = ctypes.c_uint64(), ctypes.c_uint64()
        zero_word = ctypes.addressof(self._zero_word)
        self._words = (ctypes.c_uint64 * MAX_LATENCY_WORDS)(*[zero_word] * MAX_LATENCY_WORDS)
        self._word_maps: dict[int, mmap.mmap] = {}
        self._state = PacingState(
            page=address_of(page.word),
            counters=address_of(page.counters),
            driver=progress.state,
            idle=progress.idle,
            mark=progress.mark,
            reached=progress.reached,
            own_word=ctypes.addressof(self._dummy_own_word),
            words=ctypes.addressof(self._words),
            marks=ctypes.addressof(self._marks),
            spin_ns=spin_ns,
            linger_ns=YOUNG_NS if spin_ns else 0,
            copy_mean=1,
        )
        self._state_words = memoryview(self._state).cast("B").cast("Q")
        self.address = ctypes.addressof(self._state)
        # The mean for work whose caller does not name a kind.
        self._any_mean = self.mean_of(0)
        # Addresses of two means: for the work that was begun last, and for the work that was admitted under a limit and
        # has no mark yet (0 if there is none).
        self._mean, self._admitted = self._any_mean, 0
        # When a wait last found work outstanding; 0 if it did not poll yet.
        self._work_seen_ns = 0
        page.keep_time()

    def mean_of(self, kind: int) -> int:
        """Return the address of the running mean time of one kind of work; kinds are numbers."""
        return ctypes.addressof(self._means) + 8 * ((kind * _SPREAD >> 32) % MEANS)

    # --- the account ---

    def begin(self) -> None:
        """Count work as outstanding. Use this only while the page has no time limits, and `admit` otherwise."""
        self._admitted, self._mean = 0, self._any_mean
        self._begin()

    def admit(self, mean: int, poll: Poll) -> None:
        """Hold work back for as long as the limits require, then count it as outstanding; see `begun`.

        Args:
            mean: The address of the running mean time of such work.
            poll: Called about every half millisecond during the wait; what it raises ends the wait.
        """
        self._admitted, self._mean = 0, mean
        if self._page.is_time_limited:
            self._hold(mean, poll)
        self._begin()

    def _begin(self) -> None:
        self._state_words[_IS_MARKED] = 0
        if not self._counters[_BUSY_SINCE_NS]:
            self._code.begin_work(self.address, time.monotonic_ns())

    def admit_next(self, poll: Poll) -> None:
        """Admit another part of the work that was begun or admitted last; the driver already has the previous part."""
        self.begun()
        self.admit(self._mean, poll)

    def begun(self) -> None:
        """Queue a mark after the work that `admit` admitted under limits, now that the driver has this work."""
        if self._admitted:
            self._state_words[_IS_MARKED] = 1
            self._code.mark_work(self.address, self._admitted)
            self._admitted = 0

    def _hold(self, mean: int, poll: Poll) -> None:
        if not self._state.is_ready:
            self._progress.prepare()
            self._state.is_ready = 1
        sleep_s = MIN_HELD_SLEEP_S
        try:
            while self._code.hold_work(self.address, mean):
                poll()
                time.sleep(min(sleep_s, self._to_turn_s()))
                sleep_s = min(2 * sleep_s, MAX_HELD_SLEEP_S)
        except BaseException:
            self._code.release_work(self.address, time.monotonic_ns())
            raise
        self._admitted = mean

    def _to_turn_s(self) -> float:
        """Return how long the worker may sleep before its next turn; without turns, MAX_HELD_SLEEP_S."""
        limits = self._page.time_limits
        if not limits.turn_ns or not limits.turn_period_ns:
            return MAX_HELD_SLEEP_S
        since_ns = time.monotonic_ns() - limits.turn_begin_ns
        to_turn_ns = -since_ns if since_ns < 0 else limits.turn_period_ns - since_ns % limits.turn_period_ns
        return max(to_turn_ns - TURN_SPIN_NS // 2, MIN_HELD_SLEEP_NS) / NS_PER_S

    def note_work_seen(self, now_ns: int) -> None:
        """Record when a wait last found work outstanding."""
        self._work_seen_ns = now_ns

    def begin_wait(self) -> None:
        """Record that a wait begins; `end_wait` ends it."""
        self._work_seen_ns = 0

    def end_wait(self) -> None:
        """Poll whether work is outstanding, after a wait for some or all of it."""
        if self._counters[_BUSY_SINCE_NS]:
            # A wait that sleeps on the card ended in the middle of its last sleep; any other ended just now.
            now_ns = time.monotonic_ns()
            slept = self._progress.sleeps and self._work_seen_ns
            self._state_words[_SEEN_NS] = self._work_seen_ns if slept else now_ns
            self._code.poll_work(self.address, now_ns)

    def poll(self) -> bool:
        """Return whether work is outstanding. If it has ended, end its interval."""
        if not self._counters[_BUSY_SINCE_NS]:
            return False
        return bool(self._code.poll_work(self.address, time.monotonic_ns()))

    def nap_s(self) -> float | None:
        """Return how long the worker may sleep before it polls again; None if no work is outstanding."""
        if not self.poll():
            return None
        age_ns = time.monotonic_ns() - self._counters[_BUSY_SINCE_NS]
        return min(max(age_ns / NAPS_PER_INTERVAL / 1e9, MIN_NAP_S), MAX_NAP_S)

    # --- latency words ---

    @property
    def has_own_word(self) -> bool:
        """Whether the session is of the latency class."""
        return bool(self._state.own_bit)

    def use_word(self, number: int, fd: int, *, is_own: bool) -> None:
        """Map a latency word, in place of an earlier one with this number. The caller closes the descriptor.

        Raises OSError or ValueError if the memory is not a latency word's.
        """
        page = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_own else 0))
        address = address_of(page)
        # Store the new address before the earlier mapping is closed. Native code does not run during this call.
        self._words[number] = address
        if is_own:
            self._state.own_word, self._state.own_bit = address, 1 << number
            ctypes.c_uint64.from_address(address).value = self._counters[_BUSY_SINCE_NS]
        elif self._state.own_bit == 1 << number:
            self._forget_own()
        if (earlier := self._word_maps.pop(number, None)) is not None:
            earlier.close()
        self._word_maps[number] = page

    def _forget_own(self) -> None:
        self._state.own_word, self._state.own_bit = ctypes.addressof(self._dummy_own_word), 0

    def close(self) -> None:
        """Unmap the latency words. No work may begin after this."""
        self._forget_own()
        for number, page in self._word_maps.items():
            self._words[number] = ctypes.addressof(self._zero_word)
            page.close()
        self._word_maps.clear()
