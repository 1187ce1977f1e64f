"""The control pages: memory that a worker shares with the broker and the zygote, for use without system calls.

Every worker has two pages, each a sealed memfd (memfd_create(2)). The lease's page has the state of the lease. The
broker writes it; while no broker runs, the zygote does. A worker can't write it (see `for_worker`). The worker writes
the claims page. Its tenant may have compromised the worker, so that page has no deadline and no generation, and every
reader must allow for false claims. Each field is one aligned native u64, so a reader gets the old value or the new one,
never a mixture. Times are on the monotonic clock unless stated otherwise.

The lease's page, by byte offset:

       0  revocation word: 0 while the lease lives, then the (positive) number of the status that answers every
          operation
       8  deadline of the lease, ns
      16  generation of the lease
      24  number of token marks
      32  200 marks of revoked tokens, then, for each of them, the time in ms after which it can be forgotten
    3232  length of the reason
    3240  an operator's reason for ending the lease: 512 bytes of UTF-8
    3752  time by which the worker must be gone while the revocation word is 0, ns; 0 if not written
    3760  time by which the worker must be gone once the revocation word is not 0, ns; 0 if not written
    3768  whether a connection was ever sent to the session: 1 for no, 2 for yes; 0 if not written
    3776  name of the cause that ended the lease, for the next broker: 32 bytes, padded with zeros
    3808  time until which a lease with a name may be served, ns on CLOCK_BOOTTIME; 0 for a lease without a name
    3816  allowance, ns: the session begins no work once its total busy time reaches it; 0 for no limit
    3824  queue bound, ns: the session begins no work while more estimated work than this is outstanding; 0 for none
    3832  the latency words that the session yields to, one bit each
    3840  longest time for which the session yields to one value of a latency word, ns
    3848  time at which these limits lapse, ns
    3856  the session's turns, in three words: the time at which one of them begins, ns; the length of a turn, ns, 0 for
          no turns; the time from the beginning of one turn to that of the next, ns
    3904  the broker's account of the lease's time, for the next broker, in four words: its GPU time, ns; its busy time,
          and the time for which its work was held back, as claimed at the last sample, ns; the time of that sample,
          ns, 0 if there was none

The claims page, by byte offset:

       0  launches
       8  syncs
      16  failed operations
      24  bytes allocated
      32  operations
      40  time at which the worker's loop, or one of its waits, last checked the lease's page, ns
      48  the operation in progress; 0 for none
      56  time since which the running kernel is known to run, ns; 0 for none
      64  time since which an image has been compiling, ns; 0 for none
      72  syncs that were answered with a failure
      80  copies
      88  bytes copied
      96  connections attached
     104  the most bytes that were ever allocated
     112  bytes of allocations that are kept by name
     120  bytes of allocations that no connection holds
     128  number of the park that the session is in; 0 while its bytes are on the card
     136  bytes of pages that parking moves, or has moved
     144  busy time, ns: the sum of the finished intervals in which the session had work outstanding
     152  time at which the current such interval began, ns; 0 for none
     160  time held back, ns: the sum of the finished intervals in which work waited for the limits on the lease's page
     168  time at which the current such interval began, ns; 0 for none
     176  1 if the worker keeps this account of time and applies the limits; 0 from an older worker
     184  times at which the last finished busy interval began and ended, in two words, ns
     200  what the worker says about a session that moves between workers, see `Transfer`
     208  copies ahead that were discarded because the session was used
     216  bytes of these copies
     512  for each of 16 connections, three words: its number in the session, 0 for none; its process's id, 0 if
          unknown; the bytes that it holds
    1024  length of the reason why the session can't leave its process; 0 if it can
    1032  that reason: 256 bytes of UTF-8

The memfds are sealed against shrinking: a truncated mapping would kill its reader with SIGBUS.

A session with the latency option also has a latency word, in a memfd of its own. Its worker writes the word, and the
other workers of its card read it. The word is the monotonic time, in ns, since which the session has had work
outstanding; 0 for none. While it is not 0, the other workers hold their work back, but for one value of the word never
longer than their own pages allow.
"""

import fcntl
import mmap
import os
import stat
import struct
import time
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, Self

from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The seals of memory of a fixed size (fcntl(2), F_ADD_SEALS)."""

_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE of fcntl(2), Linux 5.1: after it is set, only the mappings that already exist can write."""


def sealed_memory(name: str, size_bytes: int) -> int:
    """Return a memfd of zeros of a fixed size (fcntl(2), F_ADD_SEALS). Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Seal it against shrinking, because access beyond the file's end would kill the reader with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def published_memory(name: str, size_bytes: int) -> tuple[mmap.mmap, int]:
    """Return the only writable mapping that a new sealed memfd will ever have, and a read-only descriptor of the memfd.

    A process that receives the descriptor can neither write the file nor map it for writing, even if it runs as root or
    as this process's user and can change the file's mode and open it again under /proc/self/fd.

    Raises OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Map before sealing: F_SEAL_FUTURE_WRITE leaves existing mappings writable and forbids later writable ones.
        writable = mmap.mmap(fd, size_bytes)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | _FUTURE_WRITE)
            return writable, for_reading(fd)
        except BaseException:
            writable.close()
            raise
    finally:
        # Close the writable descriptor, so that the mapping is the only way to write.
        os.close(fd)


PAGE_BYTES: Final = mmap.PAGESIZE
# Positions on the lease's page, in words of 8 bytes. Workers and brokers of other versions map the page too, so a
# position never changes, and new fields are appended.
_WORD: Final = 0
_DEADLINE: Final = 1
_GENERATION: Final = 2
_MARKS: Final = 3

MAX_REVOKED_TOKENS: Final = 200
"""Maximum number of revoked tokens that one lease can have at a time: a page of 4096 bytes has no room for more."""

MAX_REASON_BYTES: Final = 512
"""Maximum number of bytes of an operator's reason for ending the lease."""

# Marks and their ends are two arrays, so that the worker can compare all marks with one slice.
_FIRST_MARK: Final = 4
_FIRST_END: Final = _FIRST_MARK + MAX_REVOKED_TOKENS
_REASON_LENGTH: Final = _FIRST_END + MAX_REVOKED_TOKENS
_REASON_AT: Final = 8 * (_REASON_LENGTH + 1)
_GONE_BY: Final = (_REASON_AT + MAX_REASON_BYTES) // 8
_REFUSED_GONE_BY: Final = _GONE_BY + 1
_SESSION: Final = _REFUSED_GONE_BY + 1
_CAUSE_AT: Final = 8 * (_SESSION + 1)
_CAUSE_BYTES: Final = 32
_MEMBERSHIP_DEADLINE: Final = (_CAUSE_AT + _CAUSE_BYTES) // 8
# The limits on the session's use of the card's time. Native code repeats their offsets.
_TIME_LIMITS: Final = _MEMBERSHIP_DEADLINE + 1

_TIME_ACCOUNT: Final = 488
"""The broker's account of the lease's time. It does not follow the limits directly, so that limits can be added."""

MAX_LATENCY_WORDS: Final = 8
"""Maximum number of sessions with the latency option that a card has at a time. A worker reads their words before each
launch."""

TIME_VERSION: Final = 1
"""Value that a worker writes to `Counter.TIME_VERSION` if it keeps the account of its time and applies the limits."""

CLAIM_READS: Final = 4
"""Maximum number of times that the broker reads claims that change during the read, so that a hostile worker can't
stall it."""

MEMBERSHIP_EXPIRED: Final = "its node is cut off from its fleet, and another node may serve its name"
"""The reason that a worker gives after its page's membership deadline, until the broker or zygote sets the word."""

# Values of the session field. An older broker leaves 0: it may have opened the session or not.
_NEVER_OPENED: Final = 1
_OPENED: Final = 2
_STATE: Final = struct.Struct("=QQQ")
_BOTH_GONE_BY: Final = struct.Struct("=QQ")


class Counter(IntEnum):
    """Fields of the claims page, by their position in words of 8 bytes.

    Attributes:
        metrics: The names of the metric families that add up the counter over sessions. A counter with a metric only
          grows during a session's life.
    """

    metrics: tuple[str, ...]

    def __new__(cls, position: int, *metrics: str) -> Self:
        counter = int.__new__(cls, position)
        counter._value_ = position
        counter.metrics = metrics
        return counter

    LAUNCHES = 0, "gpu_session_launch"
    # The page counts successful and failed waits separately; the metric counts all.
    SYNCS = 1, "gpu_session_sync"
    FAILED_OPS = 2, "gpu_session_operation_errors"
    ALLOCATED_BYTES = 3
    OPS = 4, "gpu_session_operation"
    LAST_POLL_NS = 5
    DOING = 6
    KERNEL_SINCE_NS = 7
    COMPILING_SINCE_NS = 8
    SYNC_ERRORS = 9, "gpu_session_sync_errors", "gpu_session_sync"
    COPIES = 10, "gpu_session_copy"
    COPIED_BYTES = 11, "gpu_session_copied_bytes"
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
    TRANSFER = 25
    AHEAD_DISCARDED = 26, "gpu_lease_park_ahead_discarded"
    AHEAD_DISCARDED_BYTES = 27, "gpu_lease_park_ahead_discarded_bytes"


class Transfer(IntEnum):
    """Which of a lease's workers has the session, for a broker that finds several; a value of `Counter.TRANSFER`.

    NONE: no image has left the worker or arrived in it, or the worker is older and writes nothing. LEFT: the worker has
    sent the session's image, and serves nothing until it is ordered to stay. SERVES: it has adopted the image, or was
    ordered to stay, and reads what the session's clients send.
    """

    NONE = 0
    LEFT = 1
    SERVES = 2


SESSION_TOTALS: Final = tuple(counter for counter in Counter if counter.metrics)
"""Counters that only grow during a session's life. Metrics add them up."""

SESSION_USES: Final = (Counter.LAUNCHES, Counter.SYNCS, Counter.COPIES, Counter.OPS)
"""With each request that a session serves, in Python or in native code, at least one of these counters changes."""

MAX_CONNECTIONS: Final = 16
"""Maximum number of connections of a SHARED session, so that a tenant can't exhaust its worker's descriptors."""

_FIRST_CONNECTION: Final = 64
_CONNECTION_WORDS: Final = 3

MAX_STAY_BYTES: Final = 256
"""Maximum number of bytes of the reason why a session can't leave its process. The longest has 150."""

_STAY_LENGTH: Final = 128
_STAY_AT: Final = 8 * (_STAY_LENGTH + 1)


class ShownConnection(NamedTuple):
    """A connection to the session, as reported by its worker.

    Attributes:
        number: Its number in the session, starting at 1.
        pid: The id of its process on this host; 0 if unknown.
        held_bytes: Bytes of its allocations.
    """

    number: int
    pid: int
    held_bytes: int


_TIME_CLAIMS: Final = slice(8 * Counter.BUSY_NS, 8 * (Counter.LAST_BUSY_UNTIL_NS + 1))


class TimeLimits(NamedTuple):
    """How much of the card's time a session may use, as its lease's page says. A value of 0 limits nothing.

    Attributes:
        allowance_ns: The session begins work only while its total busy time, since the session began, is below this.
        queue_bound_ns: The session begins no work while more than this is outstanding. The time of outstanding work is
          estimated from the running means of its kernels' times.
        latency_mask: The latency words for which the session holds its work back, one bit each.
        latency_patience_ns: The longest time for which the session holds its work back for one value of a word.
        until_ns: When all of these limits lapse, on the monotonic clock, so that a broker that hangs does not hold a
          session back for long.
        turn_begin_ns: When one of the session's turns begins, on the monotonic clock. The session begins work only
          during its turns. Turns are set only together with a queue bound.
        turn_ns: How long each turn is.
        turn_period_ns: The time from the beginning of one turn to that of the next.
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
        gpu_ns: The lease's GPU time: its share of the time during which its session was busy.
        busy_ns: The busy time that the worker claimed at the last sample.
        held_back_ns: The time held back that the worker claimed at that sample.
        sampled_ns: When that sample was taken, on the monotonic clock; 0 if there was none.
    """

    gpu_ns: int = 0
    busy_ns: int = 0
    held_back_ns: int = 0
    sampled_ns: int = 0


class TimeClaims(NamedTuple):
    """The use of the card's time that a worker claims.

    Attributes:
        busy_ns: The sum of the finished intervals in which the session had work outstanding.
        busy_since_ns: When the current such interval began, on the monotonic clock; 0 for none.
        held_back_ns: The sum of the finished intervals in which work waited for the limits.
        held_back_since_ns: When the current such interval began, on the monotonic clock; 0 for none.
        last_busy_from_ns: When the last finished interval with work outstanding began; 0 for none.
        last_busy_until_ns: When that interval ended.
    """

    busy_ns: int
    busy_since_ns: int
    held_back_ns: int
    held_back_since_ns: int
    last_busy_from_ns: int = 0
    last_busy_until_ns: int = 0

    def busy_until(self, now_ns: int) -> int:
        """Return the busy time until `now_ns`, including the current interval."""
        return self.busy_ns + (max(0, now_ns - self.busy_since_ns) if self.busy_since_ns else 0)

    def held_back_until(self, now_ns: int) -> int:
        """Return the time for which work was held back until `now_ns`, including the current interval."""
        return self.held_back_ns + (max(0, now_ns - self.held_back_since_ns) if self.held_back_since_ns else 0)


class Lapsing(Protocol):
    """The terms of a token. A connection that attached with the token may use the lease only while both are valid."""

    @property
    def mark(self) -> int:
        """The number by which the lease's page names the token once it is revoked."""

    def holds(self, now_ns: int, generation: int) -> bool:
        """Return whether the token is valid at `now_ns` for a lease of that generation."""


class PageFds(NamedTuple):
    lease: int
    claims: int


NO_FDS: Final = PageFds(-1, -1)


def for_worker(fds: PageFds) -> PageFds:
    """Return the pages for a worker, with a read-only descriptor of the lease's page. Closes `fds.lease`.

    A read-only descriptor can't be used to write, truncate or punch the file, nor to make a mapping writable, now or
    later (mmap(2), mprotect(2)). But a worker could open the file again under /proc/self/fd if the file's mode allowed
    it, and a new memfd's mode allows everyone to write (memfd_create(2)). So the mode is also made read-only. The
    worker can't change the mode, because it runs as another user, or because its system call filter forbids it.
    F_SEAL_FUTURE_WRITE can't be used here: it would also stop the next broker, which must map the page to write it.

    Raises OSError.
    """
    lease = for_reading(fds.lease)
    os.close(fds.lease)
    return PageFds(lease, fds.claims)


def for_reading(lease_fd: int) -> int:
    """Return a second, read-only descriptor of a lease's page; see `for_worker`. Raises OSError."""
    # Change the mode before opening the descriptor, which is the first one that may leave this process.
    os.fchmod(lease_fd, stat.S_IRUSR)
    return os.open(f"/proc/self/fd/{lease_fd}", os.O_RDONLY | os.O_CLOEXEC)


class PageState(NamedTuple):
    """The state of a lease, as read from its page.

    Attributes:
        word: The status that answers every operation; None while the lease lives.
        deadline_ns: When the lease ends, on the monotonic clock; 0 if it was never granted.
        generation: The number of the last grant or renewal.
        has_session: Whether a connection was ever sent to the session; True if an older broker did not record it.
        cause: The name of the cause that ended the lease; "" while it lives, or if no broker ended it.
        membership_deadline_boot_ns: Until when a lease with a name may be served, on CLOCK_BOOTTIME; 0 for a lease
            without a name.
    """

    word: Status | None
    deadline_ns: int
    generation: int
    has_session: bool = True
    cause: str = ""
    membership_deadline_boot_ns: int = 0


def state_of(lease_fd: int) -> PageState:
    """Return the state on a lease's page, which need not be mapped."""
    # Read the whole page at once. The zygote and the next broker have its descriptor, but no mapping.
    page = os.pread(lease_fd, PAGE_BYTES, 0)
    word, deadline_ns, generation = _STATE.unpack_from(page)
    (session,) = struct.unpack_from("=Q", page, 8 * _SESSION)
    try:
        # Statuses are negative numbers. The word is the number without its sign.
        status = Status(-word) if word else None
    except ValueError:
        # No broker writes such a word. Whoever wrote it, the lease is over.
        status = Status.SESSION_FAILED
    # Ignore the cause while the word is 0: it was written for an end that was not carried out.
    cause = page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES].rstrip(b"\0").decode(errors="replace") if word else ""
    (membership_deadline_boot_ns,) = struct.unpack_from("=Q", page, 8 * _MEMBERSHIP_DEADLINE)
    return PageState(status, deadline_ns, generation, session != _NEVER_OPENED, cause, membership_deadline_boot_ns)


class GoneBy(NamedTuple):
    """Times by which a worker must have exited, in monotonic nanoseconds; each is 0 if no broker has written it.

    Attributes:
        unrefused_ns: The time that applies while the revocation word is 0.
        refused_ns: The time that applies once the revocation word is not 0.
    """

    unrefused_ns: int
    refused_ns: int


def gone_by(lease_fd: int) -> GoneBy:
    """Return the times by which a worker must have exited, from its lease's page."""
    return GoneBy(*_BOTH_GONE_BY.unpack(os.pread(lease_fd, _BOTH_GONE_BY.size, 8 * _GONE_BY)))


def boot_ns() -> int:
    """Return the time on CLOCK_BOOTTIME, which keeps running while the host is suspended (clock_gettime(2))."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def flip_word(lease_fd: int, status: Status, cause: str = "") -> None:
    """Set the revocation word of a lease's page, which need not be mapped. `cause` is for the next broker."""
    # Write the cause before the word, so that a broker that reads the word also finds the cause.
    if cause:
        os.pwrite(lease_fd, _cause_field(cause), _CAUSE_AT)
    os.pwrite(lease_fd, struct.pack("=Q", -status), 8 * _WORD)


def _cause_field(cause: str) -> bytes:
    return cause.encode()[:_CAUSE_BYTES].ljust(_CAUSE_BYTES, b"\0")


class BrokerPage:
    """The broker's view of a worker's pages. The broker writes the lease's state and reads the worker's claims.

    Args:
        fds: The descriptors of pages that an earlier broker made, which this view closes; None to make new pages.

    Attributes:
        fds: The descriptors for the worker and its zygote, until `close_fds`. The view itself needs none.
    """

    def __init__(self, fds: PageFds | None = None) -> None:
        self.fds = _make() if fds is None else fds
        try:
            self._map = mmap.mmap(self.fds.lease, PAGE_BYTES)
            # Map the claims page read-only, because only the worker writes it.
            self._claims_map = mmap.mmap(self.fds.claims, PAGE_BYTES, prot=mmap.PROT_READ)
        except BaseException:
            self.close_fds()
            raise
        self._words = memoryview(self._map).cast("Q")
        self._claims = memoryview(self._claims_map).cast("Q")
        # Leave the session field of an existing page as it is: the earlier broker may have attached a connection.
        if fds is None:
            self._words[_SESSION] = _NEVER_OPENED
        else:
            self.close_fds()

    def set_deadline(self, deadline_ns: int, generation: int, gone_by_ns: int = 0) -> None:
        """Write when the lease ends, and when the zygote must end the worker. `gone_by_ns`: 0 for never."""
        # Write the zygote's limit before the deadline, because the old limit must never end a renewed lease's worker.
        self._words[_GONE_BY] = gone_by_ns
        self._words[_DEADLINE] = deadline_ns
        self._words[_GENERATION] = generation

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    def set_membership_deadline(self, membership_deadline_boot_ns: int) -> None:
        """Write the time until which a lease with a name may be served, on CLOCK_BOOTTIME."""
        self._words[_MEMBERSHIP_DEADLINE] = membership_deadline_boot_ns

    def open_session(self) -> None:
        """Record for the next broker that a connection is about to be sent to the session."""
        self._words[_SESSION] = _OPENED

    def refuse(self, status: Status, reason: str = "", gone_by_ns: int = 0, cause: str = "") -> None:
        """Set the revocation word. From its next check on, the worker answers every operation with `status`.

        Args:
            status: The status.
            reason: The operator's reason, which is sent with the status; cut at 512 bytes.
            gone_by_ns: When the zygote ends the worker if the broker has not, on the monotonic clock.
            cause: The name of the cause of the end, for the next broker, because several causes share one status.
        """
        # Write everything that explains the word before the word itself, so that a reader that reads it finds the rest.
        self._words[_REFUSED_GONE_BY] = gone_by_ns
        self._map[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES] = _cause_field(cause)
        # The cut may split a character; `WorkerPage.reason` ignores the incomplete one.
        text = reason.encode(errors="replace")[:MAX_REASON_BYTES]
        self._map[_REASON_AT : _REASON_AT + len(text)] = text
        self._words[_REASON_LENGTH] = len(text)
        self._words[_WORD] = -status

    def set_grace_end(self, gone_by_ns: int) -> None:
        """Write when the zygote ends the worker of an ended lease if the broker has not, on the monotonic clock."""
        self._words[_REFUSED_GONE_BY] = gone_by_ns

    def revoke_token(self, mark: int, until_ms: int, now_ms: int) -> bool:
        """Make the worker refuse a token.

        Args:
            mark: The token's mark, see `guests.mark_of`.
            until_ms: When the token expires and its entry becomes free, in monotonic milliseconds.
            now_ms: The current time, in monotonic milliseconds.

        Returns:
            False if the page has no room.
        """
        words = self._words
        count = words[_MARKS]
        indexes = range(count)
        # Use the token's own entry if there is one, or else the entry of an expired token, or else a new entry.
        place = next((at for at in indexes if words[_FIRST_MARK + at] == mark), None)
        if place is None:
            place = next((at for at in indexes if words[_FIRST_END + at] < now_ms), count)
        # The page is full. The caller must refuse the operator's request, because the token is still valid.
        if place == MAX_REVOKED_TOKENS:
            return False
        # Write the time first, then the mark, then the count, so that a reader gets the old state or the new one.
        words[_FIRST_END + place] = until_ms
        words[_FIRST_MARK + place] = mark
        words[_MARKS] = max(count, place + 1)
        return True

    def counter(self, counter: Counter) -> int:
        """Return one claim of the worker, for reports and to detect workers and kernels that do not end."""
        return self._claims[counter]

    def counters(self) -> list[int]:
        """Return all claims, in the order of `Counter`."""
        return self._claims[: len(Counter)].tolist()

    def set_time_limits(self, limits: TimeLimits) -> None:
        """Limit the session's use of the card's time. The worker applies the limits from its next launch on."""
        # Write the last field first: a worker that reads a new mask then also reads its patience, and a worker that
        # reads a new turn also reads its period.
        for at, value in reversed(tuple(enumerate(limits, _TIME_LIMITS))):
            self._words[at] = value

    def set_time_account(self, account: TimeAccounted) -> None:
        """Write the account of the lease's time for the next broker."""
        for at, value in enumerate(account, _TIME_ACCOUNT):
            self._words[at] = value

    def time_account(self) -> TimeAccounted:
        """Return the account that an earlier broker wrote; zeros if there is none."""
        return TimeAccounted(*self._words[_TIME_ACCOUNT : _TIME_ACCOUNT + len(TimeAccounted._fields)])

    def time_bytes(self) -> bytes:
        """Return the time claims as bytes. While these bytes stay equal and no work is outstanding, no work has run."""
        return self._claims_map[_TIME_CLAIMS]

    def time_claims(self) -> TimeClaims | None:
        """Return the use of the card's time that the worker claims; None from an older worker, which keeps no account.

        The worker ends an interval with two stores, so a sample taken between them lacks that interval. The next sample
        includes it.
        """
        claims = self._claims
        if not claims[Counter.TIME_VERSION]:
            return None
        # A worker clears the beginning of an interval before it adds the interval to the sum. So if the beginning is
        # the same before and after the sums are read, no interval is counted twice. A worker that changes it all the
        # time gains nothing: any of its claims may be false anyway.
        for _ in range(CLAIM_READS):
            since_ns = claims[Counter.BUSY_SINCE_NS], claims[Counter.HELD_BACK_SINCE_NS]
            sums = claims[Counter.BUSY_NS], claims[Counter.HELD_BACK_NS]
            last = claims[Counter.LAST_BUSY_FROM_NS], claims[Counter.LAST_BUSY_UNTIL_NS]
            if since_ns == (claims[Counter.BUSY_SINCE_NS], claims[Counter.HELD_BACK_SINCE_NS]):
                break
        return TimeClaims(sums[0], since_ns[0], sums[1], since_ns[1], *last)

    def connections(self) -> list[ShownConnection]:
        """Return the connections that the worker reports, ordered by number."""
        end = _FIRST_CONNECTION + MAX_CONNECTIONS * _CONNECTION_WORDS
        words = self._claims[_FIRST_CONNECTION:end].tolist()
        connections = [
            ShownConnection(*words[at : at + _CONNECTION_WORDS]) for at in range(0, len(words), _CONNECTION_WORDS)
        ]
        # The worker may write at the same time, so an entry may be torn. Entries are used only for display.
        return sorted(connection for connection in connections if connection.number)

    def why_stays(self) -> str:
        """Return why, as the worker claims, its session can't leave its process; "" if it can.

        The text may be torn, because the worker may write it at the same time.
        """
        length = min(self._claims[_STAY_LENGTH], MAX_STAY_BYTES)
        return self._claims_map[_STAY_AT : _STAY_AT + length].decode(errors="replace") if length else ""

    def close_fds(self) -> None:
        """Close the descriptors, once the worker and its zygote have received theirs."""
        # Clear the attribute first, so that a second call closes nothing.
        fds, self.fds = self.fds, NO_FDS
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        # Release the views first: a mapping that has views can't be closed (BufferError).
        self._words.release()
        self._claims.release()
        self._map.close()
        self._claims_map.close()
        self.close_fds()


def latency_memory() -> int:
    """Return the memfd of a new latency word, for the session's own worker. Raises OSError.

    The other workers receive a read-only descriptor, made by `for_reading`.
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
    """The worker's view of its pages. The worker reads the lease's state before every operation and writes its claims.

    Attributes:
        word: A view of the revocation word, which is not 0 once the lease is over.
        guest: The terms of the token on which the current operation depends; None for the tenant's own operations.
        counters: The claims page, by `Counter`.
    """

    def __init__(self, fds: PageFds) -> None:
        # The descriptor of the lease's page is read-only, so its mapping must also be read-only.
        self._state_map = mmap.mmap(fds.lease, PAGE_BYTES, prot=mmap.PROT_READ)
        self._count_map = mmap.mmap(fds.claims, PAGE_BYTES)
        self._state = memoryview(self._state_map).cast("Q")
        self.word = self._state[_WORD : _WORD + 1]
        self.guest: Lapsing | None = None
        self.counters = memoryview(self._count_map).cast("Q")

    def keep_time(self) -> None:
        """Declare to the broker that this worker keeps the account of its time and applies the limits."""
        self.counters[Counter.TIME_VERSION] = TIME_VERSION

    @property
    def is_time_limited(self) -> bool:
        """Whether the page has any limit, in force or lapsed."""
        # The allowance, the queue bound and the latency mask. The other words limit nothing without one of these.
        state = self._state
        return bool(state[_TIME_LIMITS] or state[_TIME_LIMITS + 1] or state[_TIME_LIMITS + 2])

    @property
    def time_limits(self) -> TimeLimits:
        return TimeLimits(*self._state[_TIME_LIMITS : _TIME_LIMITS + len(TimeLimits._fields)])

    def refusal(self) -> Status | None:
        """Return the status with which to answer every operation; None while the lease lives. Makes no system call."""
        # Check the most definite sign first: the broker's word, then the deadlines on the page, then the guest's token.
        # Each of these checks works even if the broker and the zygote hang.
        word = self._state[_WORD]
        if word:
            return Status(-word)
        now_ns = time.monotonic_ns()
        # The deadline of a lease that was never granted is 0, which has always passed.
        if now_ns >= self._state[_DEADLINE]:
            return Status.LEASE_EXPIRED
        # Use CLOCK_BOOTTIME, because another node may serve the name while this host is suspended, when CLOCK_MONOTONIC
        # does not run.
        if (until_boot_ns := self._state[_MEMBERSHIP_DEADLINE]) and boot_ns() >= until_boot_ns:
            return Status.REVOKED
        if self.guest is not None and not self._is_admitted(self.guest, now_ns):
            return Status.DENIED
        return None

    def reason(self, status: Status) -> str:
        """Return why the lease ended with that status; "" if no reason is known."""
        # Without the broker's word, the worker found out by itself that a deadline on the page has passed.
        if self._state[_WORD] != -status:
            return MEMBERSHIP_EXPIRED if status is Status.REVOKED and self._state[_MEMBERSHIP_DEADLINE] else ""
        # Also bound the length here, in case another broker version has a longer field.
        length = min(self._state[_REASON_LENGTH], MAX_REASON_BYTES)
        return self._state_map[_REASON_AT : _REASON_AT + length].decode(errors="ignore")

    def show_connection(self, number: int, pid: int) -> int:
        """Show an attached connection; return the index in `counters` of the bytes that it holds."""
        # A free entry has the number 0. The broker admits at most MAX_CONNECTIONS, so at least one entry is free.
        places = range(_FIRST_CONNECTION, _FIRST_CONNECTION + MAX_CONNECTIONS * _CONNECTION_WORDS, _CONNECTION_WORDS)
        place = next(at for at in places if not self.counters[at])
        # Write the number last, so that a reader that reads it finds the pid and bytes of this connection, not of the
        # previous one.
        self.counters[place + 1], self.counters[place + 2] = pid, 0
        self.counters[place] = number
        return place + 2

    def hide_connection(self, held_at: int) -> None:
        """Stop showing a connection that has ended. `held_at` is the result of `show_connection`."""
        # A number of 0 is enough to mark the entry as free.
        self.counters[held_at - 2] = 0

    def is_held_by(self, guest: "Lapsing") -> bool:
        return self._is_admitted(guest, time.monotonic_ns())

    def _is_admitted(self, guest: "Lapsing", now_ns: int) -> bool:
        # A renewal or a new grant changes the lease's generation, which ends all tokens of the previous generation.
        if not guest.holds(now_ns, self._state[_GENERATION]):
            return False
        count = self._state[_MARKS]
        # Copy the marks once, so that C code compares them, while the broker may append more.
        return not count or guest.mark not in self._state[_FIRST_MARK : _FIRST_MARK + count].tolist()

    def close(self) -> None:
        self.word.release()
        self._state.release()
        self.counters.release()
        self._state_map.close()
        self._count_map.close()


def show_why_stays(counters: memoryview, reason: str) -> None:
    """Show on the claims page why the session can't leave its process; "" if it can. Cut at 256 bytes."""
    text = reason.encode(errors="replace")[:MAX_STAY_BYTES]
    with counters.cast("B") as claims:
        claims[_STAY_AT : _STAY_AT + len(text)] = text
    counters[_STAY_LENGTH] = len(text)


_U64: Final = struct.Struct("=Q")


def overran(polled_ns: int, since_ns: int, bound_ms: int) -> str:
    """Return a clause about a kernel that has run for too long, according to its worker; "" if none has.

    The broker calls this function, or the zygote while no broker runs. A compromised worker may claim that no kernel
    runs, but that gains it no more time than its lease's deadline allows.

    Args:
        polled_ns: `Counter.LAST_POLL_NS`. The current time would be wrong: while a worker compiles, it does not update
          its claims, and its kernel may have ended.
        since_ns: `Counter.KERNEL_SINCE_NS`.
        bound_ms: How long a kernel may run; 0 for no bound.
    """
    # The worker wrote both times, so their difference is right even if the worker was stopped afterwards.
    if not bound_ms or not since_ns or polled_ns - since_ns < bound_ms * NS_PER_MS:
        return ""
    return f"a kernel ran for more than {bound_ms / 1000:g} s"


def overran_on(claims_fd: int, bound_ms: int) -> str:
    """Return the result of `overran` for a claims page, which need not be mapped."""
    return overran(_counter(claims_fd, Counter.LAST_POLL_NS), _counter(claims_fd, Counter.KERNEL_SINCE_NS), bound_ms)


def transfer_on(claims_fd: int) -> Transfer:
    """Return the phase that a worker reports on its claims page; NONE for a value that no worker writes."""
    try:
        return Transfer(_counter(claims_fd, Counter.TRANSFER))
    except ValueError:
        return Transfer.NONE


def park_on(claims_fd: int) -> int:
    """Return the number of the park that a worker reports on its claims page; 0 while its session is not parked."""
    return _counter(claims_fd, Counter.PARK_NUMBER)


def _counter(claims_fd: int, counter: Counter) -> int:
    (value,) = _U64.unpack(os.pread(claims_fd, _U64.size, _U64.size * counter))
    return int(value)
