"""Launches in revoked regions that native code refuses: tenant, broker and counters see what they see by Python."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.contract.messages import EndRegionOrder, ForwardRevokedReport
from gpulease.daemon.session import connection, region_operations
from gpulease.daemon.session.native.region_refusals import REFUSAL_BYTES, kernel_part, record_of, refusal_front
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import RegionWord
from helpers.region_rig import Opened, RegionRig, parsed, quiet_in, region_rig
from helpers.ring_pair import SMALL, RingLine, ring_line
from helpers.session_rig import sync

COUNTERS = (Counter.OPS, Counter.LAUNCHES, Counter.SYNCS, Counter.FAILED_OPS, Counter.SYNC_ERRORS)
AWAITED, ANSWER = 1, 33
REPLY_READER_SLEEPS = 48


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RING_LAYOUT", SMALL)
    monkeypatch.setattr(connection, "SPIN_NS", 1000)


@dataclass
class Scene:
    """A session with three regions and a set of all of them, in which launches have begun and ended."""

    made: RegionRig
    line: RingLine
    regions: list[Opened]
    region_set: int
    number: int = 20

    def launch(self, position: int, kernel: str = "scale") -> bytes:
        self.number += 1
        launch = self.made.launch(self.region_set, self.regions[0].address, position, kernel)
        return quiet_in(launch, self.number)

    def sync(self) -> bytes:
        self.number += 1
        return sync(self.number)

    def new_replies(self) -> bytes:
        replies = bytes(self.line.heard)
        self.line.heard.clear()
        return replies

    def counts(self) -> list[int]:
        return [self.made.page.counter(counter) for counter in COUNTERS]

    def reports(self) -> list[ForwardRevokedReport]:
        reports = cast(list[ForwardRevokedReport], self.made.told())
        assert all(report.flipped_ns < report.seen_ns <= report.told_ns for report in reports)
        return [replace(report, seen_ns=0, told_ns=0) for report in reports]


@contextmanager
def scene(*, is_native: bool) -> Iterator[Scene]:
    with region_rig(is_native=is_native) as made, ring_line(made.session) as line:
        made.context.does_them = False
        regions = [made.open() for _ in range(3)]
        shown = Scene(made, line, regions, made.set_of(*regions))
        # The kernel's first launches make its plan, and the plan's follower; then native code knows both kernels.
        for kernel in ("scale", "scale", "bias", "scale", "bias"):
            line.put(shown.launch(1, kernel))
        line.put(shown.sync())
        shown.new_replies()
        yield shown


def test_the_reply_is_the_same_byte_for_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for is_native in (False, True):
        with scene(is_native=is_native) as shown:
            shown.line.put(shown.launch(4) + shown.launch(5, "bias"))
            shown.made.flip(shown.regions[1], flipped_ns=1234)
            if is_native:
                # Python does not take the launch, nor the SYNC.
                monkeypatch.setattr(shown.made.session._fast_path, "_take", None)
                monkeypatch.setattr(shown.made.session, "handle", None)
            shown.line.put(shown.launch(6) + shown.sync())
            first = shown.new_replies()
            monkeypatch.undo()
            monkeypatch.setattr(connection, "RING_LAYOUT", SMALL)
            monkeypatch.setattr(connection, "SPIN_NS", 1000)
            failure = parsed(first)
            assert isinstance(failure, Failure)
            assert (failure.status, failure.site, failure.position) == (Status.REVOKED, 2, 6)
            assert (failure.region, failure.flipped_ns) == (shown.regions[1].region_id, 1234)
            assert (failure.failed_op, failure.kernel) == (Opcode.LAUNCH_IN, "scale")
            # What follows: FENCED from now on, and counted from the failure that was reported.
            shown.line.put(shown.launch(7, "bias") + shown.sync())
            again = parsed(later := shown.new_replies())
            assert isinstance(again, Failure)
            assert (again.status, again.site) == (Status.FENCED, 0)
            shown.line.put(shown.sync())
            last = shown.new_replies()
            assert not isinstance(parsed(last), Failure)
            launches = [entry[-2:] for entry in shown.made.context.launches]
            outcomes.append((first, later, last, shown.counts(), shown.reports(), launches))
    assert outcomes[0] == outcomes[1]


def test_a_tenant_that_waits_by_the_word_is_sent_to_its_sync() -> None:
    with scene(is_native=True) as shown:
        shown.made.flip(shown.regions[0])
        shown.line.words[AWAITED] = 2**63 + 9
        shown.line.put(shown.launch(1))
        assert shown.line.words[ANSWER] == 18
        # Nothing came in time: the failure is kept, as Python keeps it.
        assert shown.made.session.keeps_failure
        shown.line.put(shown.sync())
        failure = parsed(shown.new_replies())
        assert isinstance(failure, Failure)
        assert (failure.status, failure.site) == (Status.REVOKED, 0)
        assert not shown.made.session.keeps_failure


def test_a_client_that_sleeps_is_woken() -> None:
    with scene(is_native=True) as shown:
        shown.line.bells()
        shown.made.flip(shown.regions[0])
        shown.line.words[REPLY_READER_SLEEPS] = 1
        shown.line.put(shown.launch(1) + shown.sync())
        assert parsed(shown.new_replies()) is not None
        assert shown.line.bells() == 1
        assert not shown.made.session.keeps_failure


@pytest.mark.parametrize("what", ["another launch", "a lease that is over", "no room"])
def test_anything_but_a_sync_is_left_to_python(what: str) -> None:
    outcomes = []
    for is_native in (False, True):
        with scene(is_native=is_native) as shown:
            shown.made.flip(shown.regions[2])
            if what == "another launch":
                shown.line.put(shown.launch(1) + shown.launch(2) + shown.sync())
            elif what == "a lease that is over":
                shown.made.page.refuse(Status.REVOKED)
                shown.line.put(shown.launch(1) + shown.sync())
            else:
                # Replies fill the ring but for less than a refusal, and the client reads none of them meanwhile.
                for _ in range(SMALL.reply_bytes // HEADER_BYTES - 2):
                    assert shown.line.requests.put_whole(shown.sync())
                    shown.line.server._serve(shown.line.connection)
                assert shown.line.requests.put_whole(shown.launch(1) + shown.sync())
                shown.line.server._serve(shown.line.connection)
                for _ in range(3):
                    shown.line.turn()
            outcomes.append((shown.new_replies(), shown.counts(), shown.reports()))
    assert outcomes[0] == outcomes[1]


def test_other_words_are_left_to_python() -> None:
    for word in (RegionWord.CANCELLED, RegionWord.EXPIRED, RegionWord.FREED):
        replies = []
        for is_native in (False, True):
            with scene(is_native=is_native) as shown:
                shown.made.flip(shown.regions[1], word)
                shown.line.put(shown.launch(1) + shown.sync())
                replies.append((shown.new_replies(), shown.reports()))
        assert replies[0] == replies[1]


def test_a_change_elsewhere_on_the_page_needs_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene(is_native=True) as shown:
        before = len(shown.made.context.launches)
        # The deadline of one region moves, and a region of no set is revoked.
        shown.made.activate(shown.regions[1])
        shown.made.flip(replace(shown.regions[1], slot=9))
        monkeypatch.setattr(shown.made.session._fast_path, "_take", None)
        shown.line.put(shown.launch(1) + shown.sync())
        shown.line.put(shown.launch(2) + shown.sync())
        assert len(shown.made.context.launches) == before + 2
        # Past a deadline it is Python's again.
        shown.made.activate(shown.regions[1], deadline_ns=1)
        with pytest.raises(TypeError):
            shown.line.put(shown.launch(3))


def test_a_refusal_fits_with_the_longest_name_of_a_kernel() -> None:
    longest, region = kernel_part("k" * 100_000), record_of((1 << 128) - 1, 255, 1)
    assert len(refusal_front()) == 12
    assert HEADER_BYTES + region.front_bytes + len(longest) + 48 <= REFUSAL_BYTES


def test_only_a_region_that_is_not_active_makes_the_worker_look_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_operations, "SETTLE_NS", 1 << 60)
    with scene(is_native=True) as shown:
        regions = shown.made.session.regions
        shown.made.session._gate._moved_ns = -(1 << 61)
        shown.made.activate(shown.regions[1])
        assert not regions.is_moving(), "a region was renewed"
        shown.made.flip(shown.regions[1])
        # The refusal comes first: the broker's order is still to come.
        shown.line.put(shown.launch(1) + shown.sync())
        assert parsed(shown.new_replies()) is not None
        assert regions.is_moving()
        shown.made.session._gate._moved_ns = -(1 << 61)
        regions.end(EndRegionOrder(shown.regions[1].region_id, 1000))
        while regions.poll_ms(0) is not None:
            regions.advance()
            shown.made.told()
        shown.made.activate(shown.regions[2])
        assert not regions.is_moving(), "its memory is removed"
