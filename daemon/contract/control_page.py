"""Memory that two processes share: a memfd of a size that holds (memfd_create(2), fcntl(2), F_ADD_SEALS).

The control pages: what broker and worker share without a syscall.

Two sealed memfds of a page each. The lease's page is what is so: the broker writes it, without a broker the zygote, and
the worker has nothing by which it could (see `for_worker`). The claims are what the worker says: whoever reads them
takes into account that it may have been taken over, so a deadline or the number of a grant is never among them. Each
field is one aligned native u64, so a reader sees an old or a new value, never half of one.

    the lease's page                the claims
      0  revocation word              0  launches
      8  deadline, monotonic ns       8  syncs
     16  generation                  16  failed operations
     24  marks there are             24  bytes allocated
     32  200 marks of revoked        32  operations
         tokens, then when each      40  when the worker's loop, or a wait of its, last went round, monotonic ns
         can be forgotten, in        48  the operation it is in, 0 for none
         monotonic ms,               56  since when the kernel that runs is known to run, monotonic ns; 0 for none
   3232  how long is why it ended    64  since when an image is compiled, monotonic ns; 0 for none
   3240  and why: 512 bytes of UTF-8 72  syncs that were answered with a failure
   3752  when its worker is to be    80  copies
         gone, monotonic ns; 0 if    88  bytes copied
         nobody has said             96  connections that are attached
    3760  the same, once the word is
          not 0
    3768  whether a connection was
          handed to its session: 1
          none, 2 one; 0 if nobody
          has said
    3776  why it ended, as the next
          broker is to know it: 32
          bytes, zeros behind

The revocation word is 0 while the lease lives, else the (positive) number of the status that answers every operation
from then on. The memfds are sealed against shrinking: a truncated mapping would kill its reader with SIGBUS.

Whether a lease's kernel has run for longer than it may, by what its worker claims.

The broker asks, and the zygote while there is none. A worker that was taken over may claim that nothing runs, and gains
by it what its lease's deadline allows anyway.
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

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(name: str, size_bytes: int) -> int:
    """A descriptor of zeroed memory whose size nobody can change any more. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


PAGE_BYTES: Final = mmap.PAGESIZE
_WORD: Final = 0
_DEADLINE: Final = 1
_GENERATION: Final = 2
_MARKS: Final = 3

MAX_REVOKED_TOKENS: Final = 200
"""Tokens of one lease that are known as revoked at a time: what a page of 4096 bytes has room for."""

MAX_REASON_BYTES: Final = 512
"""Of why an operator ended the lease."""

_FIRST_MARK: Final = 4
_FIRST_END: Final = _FIRST_MARK + MAX_REVOKED_TOKENS
_REASON_LENGTH: Final = _FIRST_END + MAX_REVOKED_TOKENS
_REASON_AT: Final = 8 * (_REASON_LENGTH + 1)
_GONE_BY: Final = (_REASON_AT + MAX_REASON_BYTES) // 8
_REFUSED_GONE_BY: Final = _GONE_BY + 1
_SESSION: Final = _REFUSED_GONE_BY + 1
_CAUSE_AT: Final = 8 * (_SESSION + 1)
_CAUSE_BYTES: Final = 32
_NEVER_OPENED: Final = 1
_OPENED: Final = 2
_STATE: Final = struct.Struct("=QQQ")
_BOTH_GONE_BY: Final = struct.Struct("=QQ")


class Counter(IntEnum):
    """The worker's counters, by their place among the claims."""

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


class Lapsing(Protocol):
    """What a connection's right to the lease may depend on besides the lease."""

    @property
    def mark(self) -> int:
        """What it is known by once it is revoked."""

    def holds(self, now_ns: int, generation: int) -> bool:
        """Whether it still does, while the lease is of that generation."""


class PageFds(NamedTuple):
    """The descriptors of both pages."""

    lease: int
    claims: int


NO_FDS: Final = PageFds(-1, -1)


def for_worker(fds: PageFds) -> PageFds:
    """The pages as a worker may have them: of the lease's page a descriptor to read by, instead of `fds.lease`.

    By such a one nothing is written, truncated or punched, and no mapping is made, or made later, that could be written
    (mmap(2), mprotect(2)). It could be opened anew under /proc/self/fd, as the file's mode has it, which for a new
    memfd is for everybody (memfd_create(2)). Who could change the mode is kept from that: by being another user, or by
    the filter of system calls. F_SEAL_FUTURE_WRITE would be against the next broker too, who must map the page.

    Raises OSError.
    """
    lease = for_reading(fds.lease)
    os.close(fds.lease)
    return PageFds(lease, fds.claims)


def for_reading(lease_fd: int) -> int:
    """Another descriptor of a lease's page, to read by alone; see `for_worker`. Raises OSError."""
    os.fchmod(lease_fd, stat.S_IRUSR)
    return os.open(f"/proc/self/fd/{lease_fd}", os.O_RDONLY | os.O_CLOEXEC)


class PageState(NamedTuple):
    """What a broker last wrote on a lease's page.

    Attributes:
        word: The status that answers every operation; None while the lease lives.
        deadline_ns: 0 if the lease was never granted.
        cause: Why it ended, in the broker's own word; "" while it lives, or where somebody else ended it.
        has_session: A connection was handed to the session, or a broker of before that was written here may have.
    """

    word: Status | None
    deadline_ns: int
    generation: int
    has_session: bool = True
    cause: str = ""


def state_of(lease_fd: int) -> PageState:
    """Read a lease's page without mapping it."""
    page = os.pread(lease_fd, PAGE_BYTES, 0)
    word, deadline_ns, generation = _STATE.unpack_from(page)
    (session,) = struct.unpack_from("=Q", page, 8 * _SESSION)
    try:
        status = Status(-word) if word else None
    except ValueError:
        # No broker writes that: whoever did, the lease is over.
        status = Status.SESSION_FAILED
    cause = page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES].rstrip(b"\0").decode(errors="replace") if word else ""
    return PageState(status, deadline_ns, generation, session != _NEVER_OPENED, cause)


class GoneBy(NamedTuple):
    """When a worker is to be gone, monotonic nanoseconds; each is 0 if no broker has written it.

    Attributes:
        unrefused_ns: While the revocation word is 0.
        refused_ns: Once it is not.
    """

    unrefused_ns: int
    refused_ns: int


def gone_by(lease_fd: int) -> GoneBy:
    """Read when the worker of a lease's page is to be gone."""
    return GoneBy(*_BOTH_GONE_BY.unpack(os.pread(lease_fd, _BOTH_GONE_BY.size, 8 * _GONE_BY)))


def flip_word(lease_fd: int, status: Status) -> None:
    """Flip the revocation word of a lease's page that is not mapped."""
    os.pwrite(lease_fd, struct.pack("=Q", -status), 8 * _WORD)


class BrokerPage:
    """The broker's view: it writes the lease's state and reads the worker's claims.

    Args:
        fds: Pages that another broker made, this one's from now on; None to make them.

    Attributes:
        fds: To be handed over, until `let_go`; the view itself does without.
    """

    def __init__(self, fds: PageFds | None = None) -> None:
        self.fds = _make() if fds is None else fds
        try:
            self._map = mmap.mmap(self.fds.lease, PAGE_BYTES)
            self._claims_map = mmap.mmap(self.fds.claims, PAGE_BYTES, prot=mmap.PROT_READ)
        except BaseException:
            self.let_go()
            raise
        self._words = memoryview(self._map).cast("Q")
        self._claims = memoryview(self._claims_map).cast("Q")
        if fds is None:
            self._words[_SESSION] = _NEVER_OPENED
        else:
            self.let_go()

    def set_deadline(self, deadline_ns: int, generation: int, gone_by_ns: int = 0) -> None:
        """The lease lives until `deadline_ns`, its worker until `gone_by_ns`, which the zygote reads: 0 for never."""
        self._words[_GONE_BY] = gone_by_ns
        self._words[_DEADLINE] = deadline_ns
        self._words[_GENERATION] = generation

    def open_session(self) -> None:
        """Say that a connection is about to be handed to the session: the next broker must know it."""
        self._words[_SESSION] = _OPENED

    def refuse(self, status: Status, reason: str = "", gone_by_ns: int = 0, cause: str = "") -> None:
        """Flip the revocation word: every operation is answered with `status` from the worker's next look on.

        `reason` is told with it, cut at 512 bytes. The zygote reads `gone_by_ns`: see `give_grace`. `cause` is for the
        next broker: several have one status.
        """
        self._words[_REFUSED_GONE_BY] = gone_by_ns
        self._map[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES] = cause.encode()[:_CAUSE_BYTES].ljust(_CAUSE_BYTES, b"\0")
        text = reason.encode(errors="replace")[:MAX_REASON_BYTES]
        self._map[_REASON_AT : _REASON_AT + len(text)] = text
        self._words[_REASON_LENGTH] = len(text)
        self._words[_WORD] = -status

    def give_grace(self, gone_by_ns: int) -> None:
        """The worker of a lease that has ended lives until then: the zygote ends it if the broker does not."""
        self._words[_REFUSED_GONE_BY] = gone_by_ns

    def revoke_token(self, mark: int, until_ms: int, now_ms: int) -> bool:
        """Have what depends on a token refused, for as long as it could be valid; False if there is no room."""
        words = self._words
        count = words[_MARKS]
        known = range(count)
        place = next((at for at in known if words[_FIRST_MARK + at] == mark), None)
        if place is None:
            place = next((at for at in known if words[_FIRST_END + at] < now_ms), count)
        if place == MAX_REVOKED_TOKENS:
            return False
        words[_FIRST_END + place] = until_ms
        words[_FIRST_MARK + place] = mark
        words[_MARKS] = max(count, place + 1)
        return True

    def counter(self, counter: Counter) -> int:
        """What the worker says: for reports, and for finding workers and kernels that do not end."""
        return self._claims[counter]

    def counters(self) -> list[int]:
        """All of them, by their numbers."""
        return self._claims[: len(Counter)].tolist()

    def let_go(self) -> None:
        """Close the descriptors: whoever was to have the pages has them."""
        fds, self.fds = self.fds, NO_FDS
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Give the pages back."""
        self._words.release()
        self._claims.release()
        self._map.close()
        self._claims_map.close()
        self.let_go()


def _make() -> PageFds:
    lease = sealed_memory("gpulease-lease", PAGE_BYTES)
    try:
        return PageFds(lease, sealed_memory("gpulease-claims", PAGE_BYTES))
    except BaseException:
        os.close(lease)
        raise


class WorkerPage:
    """The worker's view: it reads the lease's state before every operation and keeps the counters.

    Attributes:
        word: The revocation word alone, not 0 once the lease is over.
        guest: Whose token the operations depend on that are done now; None if they are the tenant's own.
    """

    def __init__(self, fds: PageFds) -> None:
        self._state_map = mmap.mmap(fds.lease, PAGE_BYTES, prot=mmap.PROT_READ)
        self._count_map = mmap.mmap(fds.claims, PAGE_BYTES)
        self._state = memoryview(self._state_map).cast("Q")
        self.word = self._state[_WORD : _WORD + 1]
        self.guest: Lapsing | None = None
        self.counters = memoryview(self._count_map).cast("Q")

    def refusal(self) -> Status | None:
        """The status that answers every operation now, None while the lease lives. Costs no syscall."""
        word = self._state[_WORD]
        if word:
            return Status(-word)
        now_ns = time.monotonic_ns()
        if now_ns >= self._state[_DEADLINE]:
            return Status.LEASE_EXPIRED
        if self.guest is not None and not self._lets(self.guest, now_ns):
            return Status.DENIED
        return None

    def reason(self, status: Status) -> str:
        """What the broker has to say about the lease's end by that word, "" if nothing."""
        if self._state[_WORD] != -status:
            return ""
        length = min(self._state[_REASON_LENGTH], MAX_REASON_BYTES)
        return self._state_map[_REASON_AT : _REASON_AT + length].decode(errors="ignore")

    def is_held_by(self, guest: "Lapsing") -> bool:
        """Whether a token is good for anything now."""
        return self._lets(guest, time.monotonic_ns())

    def _lets(self, guest: "Lapsing", now_ns: int) -> bool:
        if not guest.holds(now_ns, self._state[_GENERATION]):
            return False
        count = self._state[_MARKS]
        return not count or guest.mark not in self._state[_FIRST_MARK : _FIRST_MARK + count].tolist()

    def close(self) -> None:
        """Give the pages back."""
        self.word.release()
        self._state.release()
        self.counters.release()
        self._state_map.close()
        self._count_map.close()


_U64: Final = struct.Struct("=Q")
_NS_PER_MS: Final = 1_000_000


def overran(looked_ns: int, since_ns: int, bound_ms: int) -> str:
    """What is to be said of a kernel that ran for too long, "" if none did.

    Args:
        looked_ns: `Counter.LOOKED_NS`, and not the time it is now: one that compiles has not looked, and the kernel may
            have ended meanwhile.
        since_ns: `Counter.KERNEL_SINCE_NS`.
        bound_ms: How long one may run, 0 for no bound.
    """
    if not bound_ms or not since_ns or looked_ns - since_ns < bound_ms * _NS_PER_MS:
        return ""
    return f"a kernel ran for more than {bound_ms / 1000:g} s"


def overran_on(claims_fd: int, bound_ms: int) -> str:
    """The same of claims that are not mapped."""
    return overran(_counter(claims_fd, Counter.LOOKED_NS), _counter(claims_fd, Counter.KERNEL_SINCE_NS), bound_ms)


def _counter(claims_fd: int, counter: Counter) -> int:
    (value,) = _U64.unpack(os.pread(claims_fd, _U64.size, _U64.size * counter))
    return int(value)
