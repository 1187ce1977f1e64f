"""Draining a node: nobody is let in, whoever is there is warned, and what is left is ended at a deadline.

Rules:

1. From the request on no lease is granted: acquires are refused, those in line and those whose worker still starts too.
   The pool's contexts are let go.
2. Every active lease is told until when it can last. Renewing it is allowed, up to that deadline and no further.
3. At the deadline every lease that is left ends, DRAINED. The node stays drained until an operator says otherwise,
   also for a table that is made from what this one left.
4. Asked again, the new deadline counts, be it sooner or later. Cancelled, all goes on: no lease has lost time it had.
"""

from typing import Final

from gpulease.daemon.core import denials
from gpulease.daemon.core.admission import Admission
from gpulease.daemon.core.book import Book
from gpulease.daemon.core.effects import ArmDrainTimer, DrainSet, Effect, Warned
from gpulease.daemon.core.events import DrainCancelled, DrainRequested
from gpulease.daemon.core.leases import Cause, LeaseState
from gpulease.daemon.core.limits import NS_PER_MS
from gpulease.daemon.core.phases import standing_of
from gpulease.daemon.core.teardown import Teardown

REASON: Final = "the node is drained"

RENEWAL_SLACK_MS: Final = 1000
"""How far past the drain's deadline a renewed lease's own may lie: it is the drain that ends it and says so, while a
worker that is never told of the drain's end still stops by itself."""


class Draining:
    """Drains; each method appends to `out` what the shell is to do."""

    def __init__(self, book: Book, teardown: Teardown, admission: Admission) -> None:
        self._book = book
        self._teardown = teardown
        self._admission = admission

    def on_requested(self, event: DrainRequested, now_ns: int, out: list[Effect]) -> None:
        """Begin, or move the deadline."""
        self._book.drain_ns = now_ns + max(0, event.within_ms) * NS_PER_MS
        self._admission.close_line(denials.draining(self._book.drain_ns - now_ns), out)
        for lease in self._book.live.values():
            if lease.state is LeaseState.PENDING:
                self._teardown.begin(lease, Cause.DRAINED, REASON, now_ns, out)
        self._set(event.request, now_ns, out)
        self.on_timer(now_ns, out)

    def on_cancelled(self, event: DrainCancelled, now_ns: int, out: list[Effect]) -> None:
        """Let tenants in again. Without a drain nothing changes."""
        self._book.drain_ns = None
        self._set(event.request, now_ns, out)

    def on_timer(self, now_ns: int, out: list[Effect]) -> None:
        """End what is left, if it is time."""
        if self._book.drain_ns is None:
            return
        if now_ns < self._book.drain_ns:
            out.append(ArmDrainTimer(self._book.drain_ns))
            return
        for lease in self._book.live.values():
            if lease.state is LeaseState.ACTIVE:
                self._teardown.begin(lease, Cause.DRAINED, REASON, now_ns, out)

    def cap(self, deadline_ns: int) -> int:
        """How long a renewal may make a lease last."""
        drain_ns = self._book.drain_ns
        return deadline_ns if drain_ns is None else min(deadline_ns, drain_ns + RENEWAL_SLACK_MS * NS_PER_MS)

    def _set(self, request: int, now_ns: int, out: list[Effect]) -> None:
        active = [lease for lease in self._book.live.values() if lease.state is LeaseState.ACTIVE]
        out.append(DrainSet(request, self._book.drain_ns, len(active)))
        for lease in active:
            standing = standing_of(lease, self._book.drain_ns, now_ns)
            out.append(Warned(lease.lease_id, standing.phase, standing.left_ms(now_ns)))
