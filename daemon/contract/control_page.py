"""The control pages: memory that a worker shares with the broker and the zygote, for use without system calls.

There are two sealed memfds of a page each for every worker (memfd_create(2)). The lease's page has the state of the
lease. The broker writes it, or the zygote while no broker runs; a worker has no means of writing it (see `for_worker`).
The worker writes the claims page, and its tenant may have compromised it. So that page has no deadline and no
generation, and every reader of a claim must allow for a lie. Each field is one aligned native u64: a reader sees an old
or a new value, never half of one.

    the lease's page                    the claims page
      0  revocation word                  0  launches
      8  deadline, monotonic ns           8  syncs
     16  generation                      16  failed operations
     24  number of token marks           24  bytes allocated
     32  200 marks of revoked tokens,    32  operations
         then 200 times from which       40  when the worker's loop, or a wait of its, last looked
         each can be forgotten,              at the page, monotonic ns
         monotonic ms                    48  the operation that it is in; 0 for none
   3232  length of the reason            56  since when the running kernel is known to run,
   3240  why an operator ended the           monotonic ns; 0 for none
         lease: 512 bytes of UTF-8       64  since when an image compiles, monotonic ns; 0 for none
   3752  when the worker is to be        72  syncs that were answered with a failure
         gone, monotonic ns; 0 if        80  copies
         it was not written              88  bytes copied
   3760  the same once the word is       96  connections that are attached
         not 0                          104  the most bytes that were allocated
   3768  whether a connection was       112  bytes of allocations that are kept by name
         sent to the session: 1 none,   120  bytes of allocations that no connection holds
         2 one; 0 if it was not         128  the number of the park that the session is in;
         written                             0 while its bytes are on the card
   3776  the lease's cause of end, for  136  bytes of pages that parking moves, or has moved
         the next broker: 32 bytes,     144  time in which the session had work outstanding,
         filled up with zeros                ns: the intervals that have ended
   3808  until when a lease with a name 152  when the present such interval began, monotonic
         may be served, on                   ns; 0 for none
         CLOCK_BOOTTIME, ns; 0 for a    160  time for which work waited for the limits on the
         lease without a name                left, ns: the intervals that have ended
   3816  allowance: the busy time, in   168  when the present one began; 0 for none
         all, up to which the session   176  1 if the worker keeps these and obeys the
         may begin work, ns; 0 for no        limits; 0 from an older worker
         limit                          184  when the last interval of work began; when it
   3824  queue bound: estimated work         ended: monotonic ns
         outstanding beyond which the   512  for each of 16 connections: its number in the
         next waits, ns; 0 for none          session, 0 for none; its process's id, 0 if that
   3832  the latency words to yield
         to, one bit each
   3840  longest time for which one
         stamp in a latency word is
         obeyed, ns
   3848  when these limits lapse,
         monotonic ns
   3856  the session's turns: when one of
         them begins, monotonic ns; how
         long each is, ns, 0 for no turns;
         time from one to the next, ns
   3904  for the next broker: the lease's
         GPU time so far, ns; its busy
         time and its time held back, by
         the claims, when the broker took
         the last sample; when that was,
         monotonic ns, 0 for never

The revocation word is 0 while the lease lives. Then it is the (positive) number of the status that answers every
operation. The memfds are sealed against shrinking: a truncated mapping would kill its reader with SIGBUS.

A session with the latency option has a latency word, too: a memfd of its own, which its worker writes and the other
workers of its card read. The word is the monotonic time, in ns, since when the session has work outstanding; 0 for
none. Others hold their work back meanwhile, but for one stamp never longer than their own pages say.
"""

import fcntl
import mmap
import os
import stat
import struct
import time
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE of fcntl(2), Linux 5.1: from then on only the existing mappings can write."""


def sealed_memory(name: str, size_bytes: int) -> int:
    """Return a memfd of zeros of a fixed size (fcntl(2), F_ADD_SEALS). Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Sealed against shrinking: a mapping beyond the file's end would kill its reader with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def published_memory(name: str, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Return the only writable mapping of a new sealed memfd that there will ever be, and a read-only descriptor.

    Even a receiver of the descriptor that is root, or this process's own user, can't write, nor map the file for
    writing, although it can change the file's mode and open the file again under /proc/self/fd.

    Raises OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Map before sealing: F_SEAL_FUTURE_WRITE keeps the mappings that exist, and forbids all later ones.
        writable = mmap.mmap(fd, size_bytes)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
            return writable, for_reading(fd)
        except BaseException:
            writable.close()
            raise
    finally:
        # The writable descriptor goes, so that the mapping is the only way to write.
        os.close(fd)


PAGE_BYTES: Final = mmap.PAGESIZE
# Positions on the lease's page, in words of 8 bytes. Workers and brokers of other versions map it too, so positions
# stay, and new fields are appended.
_WORD: Final = 0
_DEADLINE: Final = 1
_GENERATION: Final = 2
_MARKS: Final = 3

MAX_REVOKED_TOKENS: Final = 200
"""Most revoked tokens of one lease at a time: a page of 4096 bytes has no room for more."""

MAX_REASON_BYTES: Final = 512
"""Longest reason of an operator for ending the lease."""

# Marks and ends are two arrays: the worker compares all marks with one slice.
_FIRST_MARK: Final = 4
_FIRST_END: Final = _FIRST_MARK + MAX_REVOKED_TOKENS
_REASON_LENGTH: Final = _FIRST_END + MAX_REVOKED_TOKENS
_REASON_AT: Final = 8 * (_REASON_LENGTH + 1)
_GONE_BY: Final = (_REASON_AT + MAX_REASON_BYTES) // 8
_REFUSED_GONE_BY: Final = _GONE_BY + 1
_SESSION: Final = _REFUSED_GONE_BY + 1
_CAUSE_AT: Final = 8 * (_SESSION + 1)
_CAUSE_BYTES: Final = 32
_HORIZON: Final = (_CAUSE_AT + _CAUSE_BYTES) // 8
# Words about the time on the card; native code repeats their offsets.
_TIME_LIMITS: Final = _HORIZON + 1

_TIME_ACCOUNT: Final = 488
"""The broker's account of the lease's time, apart from the limits, which may grow."""

MAX_LATENCY_WORDS: Final = 8
"""Most sessions of a card with the latency option at a time: a worker reads all their words before each launch."""

TIME_VERSION: Final = 1
"""Value of `Counter.TIME_VERSION` on the page of a worker that keeps the account of time and obeys the limits."""

CLAIM_READS: Final = 4
"""How often the broker reads claims that change meanwhile. Stops a hostile worker from keeping the broker busy."""

BEYOND_HORIZON: Final = "its node is cut off from its fleet, and another node may serve its name"
"""Why a worker refuses everything after its page's membership deadline, before a broker or zygote reports it."""

# Values of the session field. 0 is what an older broker left: it may have opened the session.
_NEVER_OPENED: Final = 1
_OPENED: Final = 2
_STATE: Final = struct.Struct("=QQQ")
_BOTH_GONE_BY: Final = struct.Struct("=QQ")


class Counter(IntEnum):
    """Fields of the claims page, by their position."""

    LAUNCHES = 0
    SYNCS = 1
    FAILED_OPS = 2
    ALLOCATED_BYTES = 3
    OPS = 4
    LOOKED_NS = 5
    DOING = 6
    KERNEL_SINCE_NS = 7
    COMPILING_SINCE_NS = 8
    SYNC_ERRORS = 9
    COPIES = 10
    COPIED_BYTES = 11
    CONNECTIONS = 12
    MOST_ALLOCATED_BYTES = 13
    KEPT_BYTES = 14
    UNHELD_BYTES = 15
    PARK_NUMBER = 16
    PAGES_BYTES = 17
    BUSY_NS = 18
    BUSY_SINCE_NS = 19
    HELD_BACK_NS = 20
    HELD_BACK_SINCE_NS = 21
    TIME_VERSION = 22
    LAST_BUSY_FROM_NS = 23
    LAST_BUSY_UNTIL_NS = 24


SESSION_TOTALS: Final = (
    Counter.LAUNCHES,
    Counter.SYNCS,
    Counter.SYNC_ERRORS,
    Counter.COPIES,
    Counter.COPIED_BYTES,
    Counter.OPS,
    Counter.FAILED_OPS,
)
"""Counters that only grow over a session's life: metrics sum them up."""

MAX_CONNECTIONS: Final = 16
"""Most connections of a SHARED session. Stops a tenant from filling its worker with descriptors."""

_FIRST_CONNECTION: Final = 64
_CONNECTION_WORDS: Final = 3


class ShownConnection(NamedTuple):
    """A connection to the session, as reported by its worker.

    Attributes:
        number: Its number in the session, from 1.
        pid: Its process on this host; 0 if that is not known.
        held_bytes: Bytes of its allocations.
    """

    number: int
    pid: int
    held_bytes: int


_TIME_CLAIMS: Final = slice(8 * Counter.BUSY_NS, 8 * (Counter.LAST_BUSY_UNTIL_NS + 1))


class TimeLimits(NamedTuple):
    """How much of the card's time a session may use, by its lease's page. A value of 0 limits nothing.

    Attributes:
        allowance_ns: The session begins work only while its busy time, of its whole life, is below this.
        queue_bound_ns: It begins no work while more than this is outstanding, by the running mean times of its kernels.
        latency_mask: The latency words, by their bits, at which it holds its work back.
        latency_patience_ns: The longest time for which it does so for one stamp in a word.
        until_ns: When all of these lapse, on the monotonic clock: a broker that hangs holds no session back for long.
        turn_begin_ns: When a turn begins, on the monotonic clock. The session begins work only in its turns. Turns come
          with a queue bound.
        turn_ns: How long each turn is.
        turn_period_ns: The time from the begin of a turn to that of the next.
    """

    allowance_ns: int = 0
    queue_bound_ns: int = 0
    latency_mask: int = 0
    latency_patience_ns: int = 0
    until_ns: int = 0
    turn_begin_ns: int = 0
    turn_ns: int = 0
    turn_period_ns: int = 0


class TimeAccounted(NamedTuple):
    """The broker's account of a lease's time, with which the next broker continues.

    Attributes:
        gpu_ns: Its GPU time: its part of the time in which it was busy.
        busy_ns: The busy time that its worker claimed at the last sample.
        held_back_ns: The time held back that it claimed then.
        sampled_ns: When the sample was taken, on the monotonic clock; 0 for never.
    """

    gpu_ns: int = 0
    busy_ns: int = 0
    held_back_ns: int = 0
    sampled_ns: int = 0


class TimeClaims(NamedTuple):
    """The use of the card's time that a worker claims.

    Attributes:
        busy_ns: The intervals with work outstanding that have ended.
        busy_since_ns: When the present one began, on the monotonic clock; 0 for none.
        held_back_ns: The intervals in which work waited for the limits that have ended.
        held_back_since_ns: When the present one began; 0 for none.
        last_busy_from_ns: When the last interval with work outstanding began that has ended; 0 for none.
        last_busy_until_ns: When it ended.
    """

    busy_ns: int
    busy_since_ns: int
    held_back_ns: int
    held_back_since_ns: int
    last_busy_from_ns: int = 0
    last_busy_until_ns: int = 0

    def busy_until(self, now_ns: int) -> int:
        """Return the busy time until now, the present interval included."""
        return self.busy_ns + (max(0, now_ns - self.busy_since_ns) if self.busy_since_ns else 0)

    def held_back_until(self, now_ns: int) -> int:
        """Return the time for which work was held back until now, the present interval included."""
        return self.held_back_ns + (max(0, now_ns - self.held_back_since_ns) if self.held_back_since_ns else 0)


class Lapsing(Protocol):
    """A token's terms, on which a connection's right to the lease depends in addition to the lease itself."""

    @property
    def mark(self) -> int:
        """The number by which the lease's page names the token once it is revoked."""

    def holds(self, now_ns: int, generation: int) -> bool:
        """Return whether the token is valid, while the lease is of that generation."""


class PageFds(NamedTuple):
    lease: int
    claims: int


NO_FDS: Final = PageFds(-1, -1)


def for_worker(fds: PageFds) -> PageFds:
    """Return the pages for a worker, with a read-only descriptor of the lease's page. Closes `fds.lease`.

    A read-only descriptor can't be used to write, truncate or punch the file, nor to make a mapping writable, now or
    later (mmap(2), mprotect(2)). The worker could open the file again under /proc/self/fd, if the file's mode allows
    it: a new memfd's mode allows everyone (memfd_create(2)). So the mode is read-only, too, and the worker can't change
    it: it is another user, or the filter of system calls forbids it. F_SEAL_FUTURE_WRITE would also stop the next
    broker, which must map the page to write it.

    Raises OSError.
    """
    lease = for_reading(fds.lease)
    os.close(fds.lease)
    return PageFds(lease, fds.claims)


def for_reading(lease_fd: int) -> int:
    """Return another, read-only descriptor of a lease's page; see `for_worker`. Raises OSError."""
    # The mode first: the descriptor opened after it is the first that may leave this process.
    os.fchmod(lease_fd, stat.S_IRUSR)
    return os.open(f"/proc/self/fd/{lease_fd}", os.O_RDONLY | os.O_CLOEXEC)


class PageState(NamedTuple):
    """The state of a lease by its page.

    Attributes:
        word: The status that answers every operation; None while the lease lives.
        deadline_ns: When the lease ends, on the monotonic clock; 0 if it was never granted.
        generation: The number of the last grant or renewal.
        has_session: Whether a connection was sent to the session; True if an older broker did not record it.
        cause: The cause of the lease's end, by its name; "" while it lives, or if no broker ended it.
        horizon_boot_ns: Until when a claimed lease may be served, on CLOCK_BOOTTIME; 0 without a claim.
    """

    word: Status | None
    deadline_ns: int
    generation: int
    has_session: bool = True
    cause: str = ""
    horizon_boot_ns: int = 0


def state_of(lease_fd: int) -> PageState:
    """Return the state on a lease's page, which need not be mapped."""
    # One read of the whole page: the zygote and the next broker have the descriptor, but no mapping.
    page = os.pread(lease_fd, PAGE_BYTES, 0)
    word, deadline_ns, generation = _STATE.unpack_from(page)
    (session,) = struct.unpack_from("=Q", page, 8 * _SESSION)
    try:
        # Statuses are negative; the word is the positive number, so that 0 can mean "alive".
        status = Status(-word) if word else None
    except ValueError:
        # No broker writes such a word. Whatever wrote it, the lease is over.
        status = Status.SESSION_FAILED
    # Only with a word: the field may hold the cause of an end that was not carried out.
    cause = page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES].rstrip(b"\0").decode(errors="replace") if word else ""
    (horizon_boot_ns,) = struct.unpack_from("=Q", page, 8 * _HORIZON)
    return PageState(status, deadline_ns, generation, session != _NEVER_OPENED, cause, horizon_boot_ns)


class GoneBy(NamedTuple):
    """Times by which a worker must be gone, in monotonic nanoseconds; each is 0 if no broker has written it.

    Attributes:
        unrefused_ns: While the revocation word is 0.
        refused_ns: Once it is not.
    """

    unrefused_ns: int
    refused_ns: int


def gone_by(lease_fd: int) -> GoneBy:
    """Return when a worker must be gone according to its lease's page."""
    return GoneBy(*_BOTH_GONE_BY.unpack(os.pread(lease_fd, _BOTH_GONE_BY.size, 8 * _GONE_BY)))


def boot_ns() -> int:
    """Return the nanoseconds on CLOCK_BOOTTIME, which keeps running while the host sleeps (clock_gettime(2))."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def flip_word(lease_fd: int, status: Status, cause: str = "") -> None:
    """Set the revocation word of a lease's page, which need not be mapped; with `cause`, for the next broker."""
    # The cause before the word: a broker that reads the word must find the cause.
    if cause:
        os.pwrite(lease_fd, _cause_field(cause), _CAUSE_AT)
    os.pwrite(lease_fd, struct.pack("=Q", -status), 8 * _WORD)


def _cause_field(cause: str) -> bytes:
    return cause.encode()[:_CAUSE_BYTES].ljust(_CAUSE_BYTES, b"\0")


class BrokerPage:
    """The broker's view of a worker's pages: it writes the lease's state and reads the worker's claims.

    Args:
        fds: Pages that another broker made, which this view closes; None to make new ones.

    Attributes:
        fds: The descriptors for the worker and its zygote, until `let_go`. The view itself needs none.
    """

    def __init__(self, fds: PageFds | None = None) -> None:
        self.fds = _make() if fds is None else fds
        try:
            self._map = mmap.mmap(self.fds.lease, PAGE_BYTES)
            # For reading only: the claims are the worker's.
            self._claims_map = mmap.mmap(self.fds.claims, PAGE_BYTES, prot=mmap.PROT_READ)
        except BaseException:
            self.let_go()
            raise
        self._words = memoryview(self._map).cast("Q")
        self._claims = memoryview(self._claims_map).cast("Q")
        # A page that was taken over keeps its session field: an older broker may have attached a connection.
        if fds is None:
            self._words[_SESSION] = _NEVER_OPENED
        else:
            self.let_go()

    def set_deadline(self, deadline_ns: int, generation: int, gone_by_ns: int = 0) -> None:
        """Write when the lease ends, and for the zygote, when the worker must be gone. `gone_by_ns`: 0 for never."""
        # The zygote's limit before the deadline: a renewed lease must never be killed by the limit of the old deadline.
        self._words[_GONE_BY] = gone_by_ns
        self._words[_DEADLINE] = deadline_ns
        self._words[_GENERATION] = generation

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    def set_horizon(self, horizon_boot_ns: int) -> None:
        """Write until when a lease with a name may be served, on CLOCK_BOOTTIME."""
        self._words[_HORIZON] = horizon_boot_ns

    def open_session(self) -> None:
        """Write that a connection is about to be sent to the session, which the next broker must know."""
        self._words[_SESSION] = _OPENED

    def refuse(self, status: Status, reason: str = "", gone_by_ns: int = 0, cause: str = "") -> None:
        """Set the revocation word: the worker answers every operation with `status` from its next check on.

        Args:
            status: The status.
            reason: The operator's reason, which goes with the status; cut at 512 bytes.
            gone_by_ns: When the zygote ends the worker if the broker does not, on the monotonic clock.
            cause: The name of the cause of the end, for the next broker: several causes share one status.
        """
        # Everything that explains the word is written before the word: a reader that sees the word may use the rest.
        self._words[_REFUSED_GONE_BY] = gone_by_ns
        self._map[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES] = _cause_field(cause)
        # The cut may split a character; `WorkerPage.reason` ignores what is left of it.
        text = reason.encode(errors="replace")[:MAX_REASON_BYTES]
        self._map[_REASON_AT : _REASON_AT + len(text)] = text
        self._words[_REASON_LENGTH] = len(text)
        self._words[_WORD] = -status

    def give_grace(self, gone_by_ns: int) -> None:
        """Write the time at which the zygote ends the worker of an ended lease, if the broker does not."""
        self._words[_REFUSED_GONE_BY] = gone_by_ns

    def revoke_token(self, mark: int, until_ms: int, now_ms: int) -> bool:
        """Make the worker refuse a token.

        Args:
            mark: The token's mark, see `guests.mark_of`.
            until_ms: When the token would end anyway, so that its place is free, monotonic milliseconds.
            now_ms: The present time.

        Returns:
            False if the page has no room.
        """
        words = self._words
        count = words[_MARKS]
        known = range(count)
        # Reuse the token's own place, or one that has expired, before a new one.
        place = next((at for at in known if words[_FIRST_MARK + at] == mark), None)
        if place is None:
            place = next((at for at in known if words[_FIRST_END + at] < now_ms), count)
        # The page is full. The caller must refuse the operator's request, because the token is still valid.
        if place == MAX_REVOKED_TOKENS:
            return False
        # The time first, then the mark, then the count: a reader in between sees the old state or the new one.
        words[_FIRST_END + place] = until_ms
        words[_FIRST_MARK + place] = mark
        words[_MARKS] = max(count, place + 1)
        return True

    def counter(self, counter: Counter) -> int:
        """Return one claim of the worker: for reports, and to find workers and kernels that do not end."""
        return self._claims[counter]

    def counters(self) -> list[int]:
        """Return all claims, in the order of `Counter`."""
        return self._claims[: len(Counter)].tolist()

    def set_time_limits(self, limits: TimeLimits) -> None:
        """Limit the session's use of the card's time. The worker obeys from its next launch on."""
        # Write the last field first, so that a worker that sees a new mask also sees its patience, and with a turn its
        # period.
        for at, value in reversed(tuple(enumerate(limits, _TIME_LIMITS))):
            self._words[at] = value

    def set_time_account(self, account: TimeAccounted) -> None:
        """Write the account of the lease's time for the next broker."""
        for at, value in enumerate(account, _TIME_ACCOUNT):
            self._words[at] = value

    def time_account(self) -> TimeAccounted:
        """Return the account of an earlier broker; zeros without one."""
        return TimeAccounted(*self._words[_TIME_ACCOUNT : _TIME_ACCOUNT + len(TimeAccounted._fields)])

    def time_bytes(self) -> bytes:
        """Return the claims of time as bytes: while they are equal and nothing is under way, nothing has happened."""
        return self._claims_map[_TIME_CLAIMS]

    def time_claims(self) -> TimeClaims | None:
        """Return the use of the card's time that the worker claims; None from an older worker, which keeps no account.

        The end of an interval is two stores, so a sample may lack an interval that has just ended. The next has it.
        """
        claims = self._claims
        if not claims[Counter.TIME_VERSION]:
            return None
        # A worker clears the begin before it adds the interval. So what is read between two equal begins is not
        # counted twice. A worker that never lets two reads agree gains nothing: any of its claims may be a lie.
        for _ in range(CLAIM_READS):
            since = claims[Counter.BUSY_SINCE_NS], claims[Counter.HELD_BACK_SINCE_NS]
            sums = claims[Counter.BUSY_NS], claims[Counter.HELD_BACK_NS]
            last = claims[Counter.LAST_BUSY_FROM_NS], claims[Counter.LAST_BUSY_UNTIL_NS]
            if since == (claims[Counter.BUSY_SINCE_NS], claims[Counter.HELD_BACK_SINCE_NS]):
                break
        return TimeClaims(sums[0], since[0], sums[1], since[1], *last)

    def connections(self) -> list[ShownConnection]:
        """Return the connections that the worker reports, ordered by number."""
        end = _FIRST_CONNECTION + MAX_CONNECTIONS * _CONNECTION_WORDS
        words = self._claims[_FIRST_CONNECTION:end].tolist()
        found = [ShownConnection(*words[at : at + _CONNECTION_WORDS]) for at in range(0, len(words), _CONNECTION_WORDS)]
        # The worker writes meanwhile, so an entry may be torn. It is shown to people only.
        return sorted(one for one in found if one.number)

    def let_go(self) -> None:
        """Close the descriptors, once the worker and its zygote have theirs."""
        # Taken out first, so that a second call closes nothing.
        fds, self.fds = self.fds, NO_FDS
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        # The views first: a mapping with views can't be closed (BufferError).
        self._words.release()
        self._claims.release()
        self._map.close()
        self._claims_map.close()
        self.let_go()


def latency_memory() -> int:
    """Return the memfd of a new latency word, for the session's own worker. Raises OSError.

    The other workers get a descriptor of `for_reading`.
    """
    return sealed_memory("gpulease-latency", PAGE_BYTES)


def _make() -> PageFds:
    lease = sealed_memory("gpulease-lease", PAGE_BYTES)
    try:
        return PageFds(lease, sealed_memory("gpulease-claims", PAGE_BYTES))
    except BaseException:
        os.close(lease)
        raise


class WorkerPage:
    """The worker's view of its pages: it reads the lease's state before every operation and writes its claims.

    Attributes:
        word: The revocation word alone; not 0 once the lease is over.
        guest: The token on which the present operation depends; None for an operation of the tenant itself.
        counters: The claims page, by `Counter`.
    """

    def __init__(self, fds: PageFds) -> None:
        # The worker writes its claims and reads the lease's page: the descriptor of that one is read-only.
        self._state_map = mmap.mmap(fds.lease, PAGE_BYTES, prot=mmap.PROT_READ)
        self._count_map = mmap.mmap(fds.claims, PAGE_BYTES)
        self._state = memoryview(self._state_map).cast("Q")
        self.word = self._state[_WORD : _WORD + 1]
        self.guest: Lapsing | None = None
        self.counters = memoryview(self._count_map).cast("Q")

    def keep_time(self) -> None:
        """Show the broker that this worker keeps the account of time and obeys the limits."""
        self.counters[Counter.TIME_VERSION] = TIME_VERSION

    @property
    def is_time_limited(self) -> bool:
        """Whether any limit is on the page, in force or lapsed."""
        state = self._state
        return bool(state[_TIME_LIMITS] or state[_TIME_LIMITS + 1] or state[_TIME_LIMITS + 2])

    @property
    def time_limits(self) -> TimeLimits:
        return TimeLimits(*self._state[_TIME_LIMITS : _TIME_LIMITS + len(TimeLimits._fields)])

    def refusal(self) -> Status | None:
        """Return the status that answers every operation now; None while the lease lives. Makes no system call."""
        # Checked in the order of what is most certain: the broker's word, the deadlines on the page, the guest's token.
        # Each of these refuses even if broker and zygote hang.
        word = self._state[_WORD]
        if word:
            return Status(-word)
        now_ns = time.monotonic_ns()
        # A page without a grant has deadline 0, which is always over.
        if now_ns >= self._state[_DEADLINE]:
            return Status.LEASE_EXPIRED
        # On CLOCK_BOOTTIME: another node may serve the name while this host is suspended, when CLOCK_MONOTONIC stands
        # still.
        if (horizon_boot_ns := self._state[_HORIZON]) and boot_ns() >= horizon_boot_ns:
            return Status.REVOKED
        if self.guest is not None and not self._holds(self.guest, now_ns):
            return Status.DENIED
        return None

    def reason(self, status: Status) -> str:
        """Return why the lease ended with that status: the reason of the broker or of the page, or "" for none."""
        # No word of the broker: the worker found the end by itself, by a deadline on the page.
        if self._state[_WORD] != -status:
            return BEYOND_HORIZON if status is Status.REVOKED and self._state[_HORIZON] else ""
        # Bounded here too, in case of a broker with a longer field.
        length = min(self._state[_REASON_LENGTH], MAX_REASON_BYTES)
        return self._state_map[_REASON_AT : _REASON_AT + length].decode(errors="ignore")

    def show_connection(self, number: int, pid: int) -> int:
        """Show an attached connection; return the index in `counters` of the bytes that it holds."""
        # A free place has number 0. The broker admits at most MAX_CONNECTIONS, so one is free.
        places = range(_FIRST_CONNECTION, _FIRST_CONNECTION + MAX_CONNECTIONS * _CONNECTION_WORDS, _CONNECTION_WORDS)
        place = next(at for at in places if not self.counters[at])
        # The number last: a reader that sees it finds the pid and the bytes of this connection, not of the one before.
        self.counters[place + 1], self.counters[place + 2] = pid, 0
        self.counters[place] = number
        return place + 2

    def hide_connection(self, held_at: int) -> None:
        """Stop showing a connection that has ended. `held_at`: what `show_connection` returned."""
        # The number alone: it marks the place as free.
        self.counters[held_at - 2] = 0

    def is_held_by(self, guest: "Lapsing") -> bool:
        return self._holds(guest, time.monotonic_ns())

    def _holds(self, guest: "Lapsing", now_ns: int) -> bool:
        # Renewing or regranting the lease changes its generation, which ends all tokens of the old one.
        if not guest.holds(now_ns, self._state[_GENERATION]):
            return False
        count = self._state[_MARKS]
        # Copied once: the array is compared by C, and the broker may append meanwhile.
        return not count or guest.mark not in self._state[_FIRST_MARK : _FIRST_MARK + count].tolist()

    def close(self) -> None:
        self.word.release()
        self._state.release()
        self.counters.release()
        self._state_map.close()
        self._count_map.close()


_U64: Final = struct.Struct("=Q")


def overran(polled_ns: int, since_ns: int, bound_ms: int) -> str:
    """Return, in words, that a kernel has run for too long according to its worker; "" if none has.

    The broker calls this, and the zygote while no broker runs. A compromised worker may report that no kernel runs. It
    gains no more time than its lease's deadline allows anyway.

    Args:
        polled_ns: `Counter.LOOKED_NS`. The present time would be wrong: a worker that compiles gives no sign of life,
          and its kernel may have ended meanwhile.
        since_ns: `Counter.KERNEL_SINCE_NS`.
        bound_ms: How long a kernel may run; 0 for no bound.
    """
    # Both times are the worker's own, so their difference is right even if the worker was stopped meanwhile.
    if not bound_ms or not since_ns or polled_ns - since_ns < bound_ms * NS_PER_MS:
        return ""
    return f"a kernel ran for more than {bound_ms / 1000:g} s"


def overran_on(claims_fd: int, bound_ms: int) -> str:
    """Return the result of `overran` for a claims page, which need not be mapped."""
    return overran(_counter(claims_fd, Counter.LOOKED_NS), _counter(claims_fd, Counter.KERNEL_SINCE_NS), bound_ms)


def _counter(claims_fd: int, counter: Counter) -> int:
    (value,) = _U64.unpack(os.pread(claims_fd, _U64.size, _U64.size * counter))
    return int(value)
