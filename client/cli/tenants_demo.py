"""The demonstration of `gpulease demo`: three tenants on one card; each claim is measured as it is made.

ann works, in a process of her own, and checks every result. bob's kernel never ends; his lease does. carol gets his
memory, which reads as zeros, and has one of her two regions revoked.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from gpulease.client import (
    Buffer,
    CapacityExceeded,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    KernelArgs,
    LeaseExpired,
    Module,
    RegionRevoked,
)
from gpulease.client.cli.live_lines import LiveLines
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.reports import first_card
from gpulease.client.console.scene import Breach, Scene
from gpulease.client.console.tables import size_text, table
from gpulease.client.verify.faulty_kernels import BLOCK, ONE, count_set, fill, rule_breakers
from gpulease.client.verify.neighbour import ORPHAN_S, Neighbour, neighbour
from gpulease.client.verify.neighbour import SLICE_BYTES as ANN_BYTES
from gpulease.protocol.fast_dataclass import dataclass

MIB: Final = 1 << 20
PRIVATE_VRAM: Final = {"cpu": "256MiB", "cuda": "4GiB"}
"""A private daemon's card, by driver: small, so that carol has no room while bob is there."""

SHARED_BYTES: Final = 256 * MIB
"""Size of bob's lease at a daemon that others use too; a quarter of the free memory, if that is less."""

LEAST_BYTES: Final = 64 * MIB
"""Minimum size of bob's lease: carol's regions must fit."""

SPARE_BYTES: Final = {"cpu": 2 * MIB, "cuda": 32 * MIB}
"""Bytes of a slice that are left for code and small buffers."""

BEFORE_S: Final = 1.0
AFTER_S: Final = 1.0
"""Seconds for which ann is watched before bob comes; also the minimum after his end."""

BOB_S: Final = (2.5, 10.0, 40.0)
"""Seconds of bob's lease. If a slow host could not start his kernel within one, the next is tried."""

CAROL_S: Final = 300.0
REGION_TTL_S: Final = 120.0
REGION_BYTES: Final = 8 * MIB

END_S: Final = 60.0
"""Longest time, in seconds, until bob's thread gets the error after his lease has ended, and until his memory is
granted again."""

FIRST_LAUNCH_S: Final = 30.0
"""Longest time, in seconds, that a phase is prolonged until one of ann's launches is checked in it."""

POLL_S: Final = 0.25
PATTERN: Final = 0xA5A5A5A5
WORD_BYTES: Final = 4
VALUES: Final = 1024
FACTOR: Final = 2.0
SUMMAND: Final = 10.0
SHOWN: Final = (0, 1, 100)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the demonstration, whether it holds, and the measured value."""

    claim: str
    holds: bool
    found: str


@dataclass(slots=True)
class DemoPhase:
    """Ann's work during a part of the demonstration: launches with their complete results checked."""

    name: str
    launches: int = 0
    errors: int = 0
    seconds: float = 0.0
    first_error: str = ""

    @property
    def per_s(self) -> float:
        """Checked launches per second of the phase; 0 before the first `update`."""
        return self.launches / self.seconds if self.seconds else 0.0


class Ann:
    """Watches ann's process, and records her work by phase."""

    def __init__(self, process: Neighbour, lines: LiveLines) -> None:
        self._process, self._lines = process, lines
        self.phases: list[DemoPhase] = []
        self._updated_s = 0.0

    def begin(self, name: str) -> None:
        """End the current phase, and begin another."""
        # Drop the first window, because it began before the first phase.
        if self.phases:
            self.update()
        else:
            self._process.window()
        self._updated_s = time.monotonic()
        self.phases.append(DemoPhase(name))

    def update(self) -> None:
        """Add her work since the last call to the current phase."""
        window, phase = self._process.window(), self.phases[-1]
        now_s = time.monotonic()
        # Errors are counted, and the first one is kept as an example.
        phase.launches += window.rounds
        phase.errors += window.errors
        phase.first_error = phase.first_error or window.error
        phase.seconds += now_s - self._updated_s
        self._updated_s = now_s

    def watch(
        self, is_over: Callable[[], bool], wait: Callable[[float], Any] = time.sleep, note: Callable[[], str] = str
    ) -> None:
        """Show her work until `is_over` returns true.

        Args:
            is_over: Returns whether to stop.
            wait: Waits for a number of seconds. It may return earlier, when `is_over` has become true.
            note: Returns the text to show after her work.
        """
        while not is_over():
            wait(POLL_S)
            self.update()
            # The totals of all phases, with the present phase's rate.
            launches, errors = (sum(getattr(phase, name) for phase in self.phases) for name in ("launches", "errors"))
            rate = f"{self.phases[-1].per_s:,.0f} a second"
            self._lines.show(f"       ann: {launches:,} launches checked, {errors} errors, {rate}{note()}")
        self._lines.settle()

    def watch_for(self, seconds: float) -> None:
        """Show her work for this many seconds; on a slow host, until something was launched in the phase."""
        phase, until_s = self.phases[-1], time.monotonic() + seconds

        def is_over() -> bool:
            late_s = time.monotonic() - until_s
            return late_s >= 0 and bool(phase.launches or phase.errors or late_s >= FIRST_LAUNCH_S)

        self.watch(is_over)

    def claim(self) -> Claim:
        """Return the claim that no launch of hers was wrong or failed, in any phase."""
        errors = sum(phase.errors for phase in self.phases)
        first = next((f": {phase.first_error}" for phase in self.phases if phase.first_error), "")
        # The absence of errors is not enough: in each phase a launch must have run.
        holds = not errors and all(phase.launches for phase in self.phases)
        counts = ", ".join(f"{phase.launches:,} {phase.name}" for phase in self.phases)
        return Claim(
            "all of ann's launches had the right result, all the time", holds, f"{counts}; {errors} errors{first}"
        )


class Bob:
    """bob: a lease filled with his bytes, and a kernel that never ends.

    Attributes:
        error_name: The error with which his session ended; "nothing" while there is none.
        error_after_ms: Milliseconds from his lease's deadline until the error came, by this machine's monotonic clock.
        proved_after_ms: Milliseconds from the deadline until his memory was proved free, by the daemon's clock.
    """

    def __init__(self, scene: Scene, size_bytes: int, seconds: float) -> None:
        self.lease = scene.builder(size_bytes, seconds).timeout(END_S).acquire()
        # His deadline on this side's clock; the daemon's began a little before.
        self.deadline_s = time.monotonic() + self.lease.remaining_s
        self.requested_s = seconds
        self.error_name = "nothing"
        self.error_after_ms = self.proved_after_ms = 0.0
        self._session: GpuSession | None = None
        self._kept: tuple[Buffer, ...] = ()
        self._thread = threading.Thread(name="bob", daemon=True)

    def start(self, written_bytes: int) -> int:
        """Fill his memory, and start the kernel; returns how many words he wrote. Raises LeaseExpired."""
        session = self._session = GpuSession(self.lease)
        words = written_bytes // WORD_BYTES
        module = session.module_load(rule_breakers())
        # The kernel runs until the flag is not 0. New memory is 0, and no one else can write to it.
        memory, flag = self._kept = session.mem_alloc(written_bytes), session.mem_alloc(WORD_BYTES)
        # A pattern that no other tenant uses, so that any word of it found elsewhere is his.
        fill(session, module, memory, words, PATTERN)
        written = count_set(session, module, memory, words)
        session.launch(module, "endless", ONE, ONE, KernelArgs().push_buffer(flag))
        # Bob's call waits in a thread, as in a tenant's program.
        self._thread = threading.Thread(target=self._wait, args=(session,), name="bob", daemon=True)
        self._thread.start()
        return written

    def _wait(self, session: GpuSession) -> None:
        try:
            session.sync()
        except GpuLeaseError as error:
            self.error_after_ms = (time.monotonic() - self.deadline_s) * 1e3
            self.error_name = type(error).__name__

    @property
    def left_s(self) -> float:
        """Seconds until his deadline, by this machine's monotonic clock; 0 after it."""
        return max(0.0, self.deadline_s - time.monotonic())

    def join(self, seconds: float) -> None:
        """Wait until his session has raised its error, at most this many seconds."""
        self._thread.join(seconds)

    def has_error(self) -> bool:
        """True once his session has raised its error, or END_S after his deadline."""
        return not self._thread.is_alive() or time.monotonic() > self.deadline_s + END_S

    def end(self, scene: Scene) -> str:
        """Wait until his memory is proved free; returns the cause of his lease's end, or an error text."""
        try:
            cause = scene.wait_for_end(self.lease.lease_id)
        except Breach as breach:
            return str(breach)
        # The daemon measures from its own deadline to its own proof.
        self.proved_after_ms = scene.query(self.lease.lease_id)["ended_after_deadline_us"] / 1e3
        return cause

    def leave(self) -> None:
        """Free the lease, if it has not ended, and close the session."""
        with contextlib.suppress(GpuLeaseError):
            self.lease.free()
        if self._session is not None:
            self._session.close()


def run_tenants_demo(
    address: str, lines: LiveLines, transform_ptx: bytes, *, is_private: bool
) -> tuple[dict[str, Any], list[Claim]]:
    """Run the demonstration; returns its report and its claims. Raises MissingPrerequisite, Breach or GpuLeaseError.

    Args:
        address: The daemon's address.
        lines: Prints the progress.
        transform_ptx: PTX with `scale` and `bias`.
        is_private: Whether this program alone uses the daemon.
    """
    # All tenants use the first card of one daemon.
    scene = Scene.at(address)
    with neighbour(address, scene.card_uuid) as process:
        ann = Ann(process, lines)
        # Step 1: only ann works, as a baseline.
        before = first_card(address)
        # bob takes so much that carol can't have as much before his end.
        size = _bob_bytes(before["available_bytes"], is_private=is_private)
        spare = SPARE_BYTES["cuda" if scene.is_card else "cpu"]
        lines.say(f"ann    leases {size_text(ANN_BYTES)}, launches kernels in a loop, and compares every result")
        ann.begin("before bob")
        ann.watch_for(BEFORE_S)

        ann.begin("while bob writes")
        # Step 2: bob takes most of the card, and his kernel never ends. carol is refused as long as he has it.
        with _bob_at_work(scene, size, size - spare, lines) as (bob, written):
            during = first_card(address)
            # At a daemon that others use too, there may be room for both.
            needs_bobs_memory = size > during["available_bytes"]
            refused = _refusal(scene, size) if needs_bobs_memory else ""
            if needs_bobs_memory:
                free = size_text(during["available_bytes"])
                lines.say(f"carol  asks for {size_text(size)} too, and {free} are free: {refused or 'granted'}")
            ann.begin("next to bob's endless kernel")
            ann.watch(bob.has_error, bob.join, lambda: f"; bob's kernel runs, his lease has {bob.left_s:.1f} s left")
            # Step 3: his lease expires: his call raises, his process is killed, and his memory is proved free.
            end = bob.end(scene)
            ann.begin("after it, next to carol")
        after = first_card(address)
        lines.say(f"bob    {bob.error_after_ms:+.1f} ms from his deadline: his call ends, {bob.error_name}")
        lines.say(f"       {bob.proved_after_ms:+.1f} ms from it: his process is killed, his memory is proved free")
        cards = {"before": before, "beside_bob": during, "after": after}
        free = ", ".join(
            f"{size_text(card['available_bytes'])} {name.replace('_', ' ')}" for name, card in cards.items()
        )
        lines.say(f"       free on the card: {free}")

        claims = [
            Claim(
                "bob's endless kernel ended with his lease",
                (bob.error_name, end) == (LeaseExpired.__name__, "expired"),
                f"{bob.error_name}; the lease's end: {end}",
            )
        ]
        # The comparison is possible only if nobody else has a lease, whose memory would be counted.
        if before["leases"] == after["leases"] == 1:
            came_back = after["available_bytes"] - during["available_bytes"]
            result = f"{size_text(size)} leased, {size_text(max(0, came_back))} came back"
            claims.append(Claim("bob's memory was free again", came_back >= size, result))
        report: dict[str, Any] = {
            "driver": scene.driver,
            "card": scene.card_uuid,
            "tenant": bob.lease.query()["tenant"],
        }
        # Step 4: carol gets the same bytes and must read zeros.
        with scene.builder(size, CAROL_S).orphan_secs(ORPHAN_S).timeout(END_S).acquire() as carol:
            granted_ms = (time.monotonic() - bob.deadline_s) * 1e3
            if needs_bobs_memory:
                result = f"{refused or 'granted'} while bob had it; granted {granted_ms:.0f} ms after his deadline"
                claims.append(Claim("carol's memory is bob's", bool(refused), result))
            carols_report, carols_claims = _carol(carol, lines, size - spare, written, granted_ms, transform_ptx)
            ann.watch_for(max(0.0, AFTER_S - ann.phases[-1].seconds))
            report |= carols_report | {"remaining_s": round(carol.remaining_s, 3)}
    # Step 5: make ann's claim last, because it covers everything that happened.
    claims = [ann.claim(), *claims, *carols_claims]
    report |= {
        "free_bytes": {name: card["available_bytes"] for name, card in cards.items()},
        "expired_lease": {
            "error": bob.error_name,
            "lease_id": bob.lease.lease_id_text,
            "after_s": round(bob.requested_s + bob.error_after_ms / 1e3, 3),
            "told_after_deadline_ms": round(bob.error_after_ms, 3),
            "free_after_deadline_ms": round(bob.proved_after_ms, 3),
            "slice_bytes": size,
        },
        "ann": [
            asdict(phase) | {"seconds": round(phase.seconds, 3), "per_s": round(phase.per_s, 1)} for phase in ann.phases
        ],
        "claims": [asdict(claim) for claim in claims],
    }
    rows = [[ran.name, f"{ran.launches:,}", str(ran.errors), f"{ran.per_s:,.0f}"] for ran in ann.phases]
    lines.say("\n" + table(["ann's work", "launches checked", "errors", "a second"], rows))
    return report, claims


def _bob_bytes(free_bytes: int, *, is_private: bool) -> int:
    """Return the size of bob's lease, and of carol's: on a card of their own, more than half of the free memory."""
    # Alone on the card: three quarters. Otherwise at most a quarter of the free memory.
    size = free_bytes * 3 // 4 if is_private else min(SHARED_BYTES, free_bytes // 4)
    size -= size % (2 * MIB)
    if size < LEAST_BYTES:
        raise MissingPrerequisite(
            f"the card must have {size_text(4 * LEAST_BYTES)} free for the demonstration, not {size_text(free_bytes)}"
        )
    return size


@contextlib.contextmanager
def _bob_at_work(scene: Scene, size: int, written_bytes: int, lines: LiveLines) -> Iterator[tuple[Bob, int]]:
    """Yield bob with his kernel started, and how many words he wrote; at the end his lease has ended."""
    # A slow host gets a longer lease with each try.
    for seconds in BOB_S:
        bob = Bob(scene, size, seconds)
        try:
            written = bob.start(written_bytes)
        except LeaseExpired:
            lines.say(f"bob    could not start within the {seconds:g} s of his lease: this host is slow")
            bob.leave()
            continue
        except BaseException:
            bob.leave()
            raise
        try:
            lease = f"leases {size_text(size)} for {seconds:g} s"
            lines.say(f"bob    {lease}, fills it with {PATTERN:#x}, starts an endless kernel")
            yield bob, written
        finally:
            bob.leave()
        return
    raise MissingPrerequisite(f"this host is too slow: no kernel was started within {BOB_S[-1]:g} s")


def _refusal(scene: Scene, size: int) -> str:
    """Return the error that carol gets while bob has the memory; "" if she gets a lease."""
    try:
        scene.builder(size).acquire().free()
    except CapacityExceeded as error:
        return type(error).__name__
    return ""


def _carol(
    lease: GpuLease, lines: LiveLines, read_bytes: int, written: int, granted_ms: float, transform_ptx: bytes
) -> tuple[dict[str, Any], list[Claim]]:
    words = read_bytes // WORD_BYTES
    with GpuSession(lease) as session:
        # Read the memory before anything is written. A word that is not 0 would be bob's.
        module = session.module_load(rule_breakers())
        memory = session.mem_alloc(read_bytes)
        nonzero_words = count_set(session, module, memory, words)
        session.mem_free(memory)
        read = f"gets {size_text(lease.size_bytes)}, reads {words:,} words: {nonzero_words:,} are not 0"
        lines.say(f"carol  {granted_ms:+.0f} ms from bob's deadline: {read}")
        # Then she computes, as any tenant does.
        results = _transformed(session, transform_ptx)
        expected = np.arange(VALUES, dtype=np.float32) * FACTOR + SUMMAND
        lines.say(f"       runs x * {FACTOR:g} + {SUMMAND:g} on {VALUES} floats: x[100] = {results[100]:g}")
        region_claim = _one_region_revoked(lease, session, module, lines)
    claims = [
        Claim(
            "carol reads only zeros",
            written == words and not nonzero_words,
            f"bob wrote {written:,} words, carol read {words:,}: {nonzero_words:,} not 0",
        ),
        Claim("her kernels' results are right", np.array_equal(results, expected), f"{VALUES} floats compared"),
        region_claim,
    ]
    report = {
        "lease_id": lease.lease_id_text,
        "slice_bytes": lease.size_bytes,
        "results": {str(index): float(results[index]) for index in SHOWN},
    }
    return report, claims


def _transformed(session: GpuSession, ptx: bytes) -> "np.ndarray[Any, np.dtype[np.float32]]":
    array = session.array(np.arange(VALUES, dtype=np.float32))
    module = session.module_load(ptx)
    # Launch scale, then bias, without a wait between them.
    for kernel, operand in (("scale", FACTOR), ("bias", SUMMAND)):
        args = KernelArgs().push_buffer(array).push_u32(VALUES).push_f32(operand)
        session.launch(module, kernel, (VALUES // BLOCK[0], 1, 1), BLOCK, args)
    result: np.ndarray[Any, np.dtype[np.float32]] = array.numpy()
    return result


def _one_region_revoked(lease: GpuLease, session: GpuSession, module: Module, lines: LiveLines) -> Claim:
    """Revoke one of two regions of a session, and continue in the other."""
    with (
        lease.region(REGION_BYTES, ttl_secs=REGION_TTL_S) as kept_region,
        lease.region(REGION_BYTES, ttl_secs=REGION_TTL_S) as revoked_region,
    ):
        words = kept_region.size_bytes // WORD_BYTES
        kept_set, revoked_set = session.region_set([kept_region]), session.region_set([revoked_region])
        # Fill both regions, then revoke one. Its launches must be refused, and the other region's words must be
        # unchanged.
        for region, regions in ((kept_region, kept_set), (revoked_region, revoked_set)):
            fill(session, module, region.address, words, PATTERN, regions)
        session.sync()
        started_s = time.monotonic()
        revoked_region.revoke("the demonstration")
        back_ms = (time.monotonic() - started_s) * 1e3
        refusal = ""
        try:
            fill(session, module, revoked_region.address, words, PATTERN, revoked_set)
            session.sync()
        except GpuLeaseError as error:
            refusal = type(error).__name__
        # All words of the other region must still be set; then her kernels clear them.
        words_left = count_set(session, module, kept_region.address, words, kept_set)
        fill(session, module, kept_region.address, words, 0, kept_set)
        cleared = words - count_set(session, module, kept_region.address, words, kept_set)
    size = size_text(REGION_BYTES)
    lines.say(f"       has two regions of {size} in one session; one is revoked, proved back in {back_ms:.1f} ms")
    result = f"{words_left:,} of {words:,} words are there"
    lines.say(f"       a launch in it: {refusal or 'taken'}; in the other {result}, kernels continue")
    holds = refusal == RegionRevoked.__name__ and words_left == words and cleared == words
    return Claim("one region is revoked, the other continues", holds, f"{refusal or 'taken'}; in the other {result}")
