"""Tenants and an operator that use a daemon that is killed repeatedly, and a record of the replies that they got."""

import itertools
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpulease.client import (
    Busy,
    CapacityExceeded,
    Disconnected,
    GpuBuilder,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    LeaseExpired,
    Revoked,
    TimedOut,
)
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode, RevokeOutcome
from gpulease.protocol.messages import LeaseRevoke
from helpers.kernels import Neighbour, start_endless
from helpers.submits import ROOM, check_scaled, endless, scaling

LATE_S: Final = 8.0
"""How long an endless kernel may run after its deadline: a limit for a test on a busy host, not the product's promise.
"""

MIB: Final = 1 << 20

CHECK_PAUSE_S: Final = 0.01
"""Pause between two checks of a tenant, which leaves the broker and its successors time on a host of two cores."""


@dataclass
class Told:
    """What a tenant knows about its lease from replies.

    Attributes:
        surely_until: The lease lives at least until then (monotonic clock), unless it was ended on purpose.
        perhaps_until: The lease may live until then, because a renewal got no reply.
        given_back: The tenant has begun to free it.
        is_revoking: The operator has begun to revoke it. `is_revoked`: the revocation was confirmed.
    """

    lease_id: int
    size_bytes: int
    generation: int
    surely_until: float
    perhaps_until: float
    has_submits: bool = False
    given_back: bool = False
    is_revoking: bool = False
    is_revoked: bool = False
    is_over: bool = False


@dataclass
class Load:
    """All tenants, and the operator.

    Attributes:
        told: What tenants know about their leases, by lease id.
        counts: How often each action was done.
        wrong: Sentences about faults that were found.
    """

    address: str
    seed: int
    told: dict[int, Told] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, tenants: int) -> None:
        works = [self._tenant] * tenants + [self._operator]
        for number, work in enumerate(works):
            dice = random.Random(self.seed * 1000 + number)
            thread = threading.Thread(target=self._run, args=(work, dice), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop all threads. Every tenant first frees its lease."""
        self.stopped.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a tenant hangs"

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def _run(self, work: Callable[[random.Random], None], dice: random.Random) -> None:
        try:
            while not self.stopped.is_set() and not self.wrong:
                work(dice)
        except BaseException:
            self.wrong.append(traceback.format_exc())

    # --- a tenant ---

    def _tenant(self, dice: random.Random) -> None:
        builder = GpuBuilder(self.address).device(0)
        size, ttl_s = dice.randint(1, 24) * MIB, dice.choice([0.4, 1.0, 3.0, 8.0])
        builder.min_vram(size).lease_secs(ttl_s).timeout(dice.choice([0, 0, 0.5]))
        if has_submits := dice.random() < 0.5:
            builder.submits(ROOM)
            size += ROOM
        asked_at = time.monotonic()
        try:
            lease = builder.acquire()
        except (Disconnected, CapacityExceeded) as error:
            self.count(f"acquire: {type(error).__name__}")
            time.sleep(0.02)
            return
        told = Told(lease.lease_id, size, lease.generation, asked_at + ttl_s, time.monotonic() + ttl_s, has_submits)
        self.told[lease.lease_id] = told
        self.count("granted")
        try:
            self._use(dice, lease, told)
        except LeaseExpired:
            self.count("expired")
            self._check_expired(told)
        except Disconnected:
            # The broker was gone for so long that the reason for the lease's end is unknown.
            self.count("end: Disconnected")
            self._check_expired(told)
        except Revoked:
            self.count("revoked")
            if not told.is_revoking:
                self.wrong.append(f"{told} is revoked, and nobody did that")
        told.is_over = True

    def _use(self, dice: random.Random, lease: GpuLease, told: Told) -> None:
        try:
            session = GpuSession(lease, shared_memory=dice.random() < 0.7)
        except (Disconnected, Busy) as error:
            # The broker had the connection when it was killed or stopped.
            self.count(f"attach: {type(error).__name__}")
            self._free(lease, told)
            return
        with session:
            neighbour = Neighbour(session)
            if dice.random() < 0.15:
                self._run_endless(session, told)
            for _ in itertools.takewhile(lambda _: not self.stopped.is_set(), range(dice.randint(1, 12))):
                until = time.monotonic() + dice.random() * 0.1
                while time.monotonic() < until:
                    neighbour.check()
                    self.stopped.wait(CHECK_PAUSE_S)
                if dice.random() < 0.4:
                    self._renew(dice, lease, told)
                if dice.random() < 0.2:
                    self._query(lease, told)
                if told.has_submits and dice.random() < 0.4:
                    self._submit(dice, lease, told)
        self._free(lease, told)

    def _run_endless(self, session: GpuSession, told: Told) -> None:
        kept = start_endless(session)
        self.count("endless kernel")
        if told.surely_until - time.monotonic() < 5:
            try:
                session.sync()
            finally:
                if time.monotonic() > told.perhaps_until + LATE_S:
                    self.wrong.append(f"{told} was over long ago")
        del kept

    def _renew(self, dice: random.Random, lease: GpuLease, told: Told) -> None:
        ttl_s = dice.choice([0.5, 2.0, 5.0])
        told.perhaps_until = max(told.perhaps_until, time.monotonic() + ttl_s + 31)
        asked_at = time.monotonic()
        try:
            lease.renew(ttl_s)
        except Disconnected:
            self.count("renew: Disconnected")
            return
        told.perhaps_until = max(told.surely_until, time.monotonic() + ttl_s)
        told.surely_until = max(told.surely_until, asked_at + ttl_s)
        if lease.generation <= told.generation:
            self.wrong.append(f"{told} was renewed to generation {lease.generation}")
        told.generation = lease.generation
        self.count("renewed")

    def _submit(self, dice: random.Random, lease: GpuLease, told: Told) -> None:
        """Run a job, and check the reply.

        A correct job must have the right result, an endless job must not succeed, and a lost job must be reported as
        lost.
        """
        is_endless, factor, surely_until = dice.random() < 0.2, dice.randint(2, 9), told.surely_until
        try:
            work = endless(lease).timeout_secs(0.3) if is_endless else scaling(lease, factor=factor)
            outputs = work.launch()
        except (Disconnected, Busy) as error:
            self.count(f"submit: {type(error).__name__}")
            return
        except TimedOut:
            self.count("submit: TimedOut")
            if not is_endless and time.monotonic() < surely_until:
                self.wrong.append(f"{told}: a submit of a moment took too long")
            return
        self.count("submitted")
        if is_endless:
            self.wrong.append(f"{told}: a kernel that never ends has answered")
            return
        check_scaled(outputs, factor=factor)

    def _query(self, lease: GpuLease, told: Told) -> None:
        report = lease.query()
        self.count("queried")
        if report["generation"] < told.generation or report["size_bytes"] != told.size_bytes:
            self.wrong.append(f"{told} is {report}")
        if report["cause"] is not None and not self._may_have_ended(told):
            self.wrong.append(f"{told} ended: {report}")

    def _free(self, lease: GpuLease, told: Told) -> None:
        told.given_back = True
        lease.free()
        self.count("freed")
        told.is_over = True

    def _check_expired(self, told: Told) -> None:
        if time.monotonic() < told.surely_until and not told.is_revoking:
            self.wrong.append(f"{told} expired at {time.monotonic()}")

    def _may_have_ended(self, told: Told) -> bool:
        return told.given_back or told.is_revoking or time.monotonic() >= told.surely_until

    # --- an operator ---

    def _operator(self, dice: random.Random) -> None:
        self.stopped.wait(dice.random() * 0.6)
        living = [told for told in list(self.told.values()) if not told.is_over and not told.is_revoking]
        if not living:
            return
        told = dice.choice(living)
        told.is_revoking = True
        try:
            answer = ask(Opcode.LEASE_REVOKE, LeaseRevoke(told.lease_id, "the operator's wish"), self.address)
        except GpuLeaseError as error:
            self.count(f"revoke: {type(error).__name__}")
            return
        if answer.outcome != RevokeOutcome.TORN_DOWN:
            self.wrong.append(f"{told}: its revoke came to {answer.outcome}")
        told.is_revoked = True
        self.count("revoke")
