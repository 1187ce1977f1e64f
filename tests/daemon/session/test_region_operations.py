"""Launches and copies that name regions: looked at each time, refused once with the cause, then as FENCED."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.contract.messages import EndRegionOrder, ForwardRevokedReport, RegionReleasedReport
from gpulease.daemon.session import region_operations
from gpulease.protocol.messages import (
    Empty,
    Handle,
    Launch,
    LaunchWith,
    MemAlloc,
    MemRead,
    MemWrite,
    RegionRef,
    RegionRefusal,
    RegionSet,
)
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import RegionWord
from helpers.region_rig import GRANULE, RegionRig, quiet_in, region_rig
from helpers.session_rig import SIZES, quiet, sync


@pytest.fixture(name="made", params=["python", "native"])
def _made(request: pytest.FixtureRequest) -> Iterator[RegionRig]:
    with region_rig(is_native=request.param == "native") as made:
        yield made


def tags(made: RegionRig) -> list[int]:
    return [entry[4] for entry in made.context.launches]


def test_a_launch_in_a_set_of_active_regions_begins(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    chosen = made.set_of(one, two)
    made.feed(b"".join(quiet_in(made.launch(chosen, one.address, number), number) for number in range(1, 20)))
    assert tags(made) == list(range(1, 20))
    made.ask(Opcode.SYNC, Empty())
    assert made.told() == []


def test_native_code_does_all_but_the_first(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.feed(b"".join(quiet_in(made.launch(chosen, one.address, number), number) for number in range(1, 21)))
    assert made.context.taken_natively in (0, 19)
    assert made.page.counter(Counter.LAUNCHES) == 20


def test_the_first_refusal_says_how_the_region_ended_and_later_ones_are_fenced(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    chosen = made.set_of(two, one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 3)
    made.flip(one, RegionWord.REVOKED, flipped_ns=1234)
    made.feed(quiet_in(made.launch(chosen, one.address, position=99), 2) * 2)
    first = made.refused(Opcode.SYNC, Empty())
    assert (first.status, first.region, first.site) == (Status.REVOKED, one.region_id, 3)
    assert (first.flipped_ns, first.position, first.kernel) == (1234, 99, "scale")
    assert (first.failed_op, first.failed_request_id) == (Opcode.LAUNCH_IN, 2)
    assert f"{one.region_id:032x}" in first.message
    assert first.hint
    for _ in range(2):
        later = made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address, position=7))
        assert (later.status, later.region, later.site) == (Status.FENCED, one.region_id, 0)
        assert (later.flipped_ns, later.position) == (1234, 7)
    assert tags(made) == [1, 1, 1]


@pytest.mark.parametrize(
    ("word", "status"),
    [
        (RegionWord.REVOKED, Status.REVOKED),
        (RegionWord.EXPIRED, Status.LEASE_EXPIRED),
        (RegionWord.FREED, Status.LEASE_FREED),
    ],
)
def test_each_end_has_its_status(made: RegionRig, word: RegionWord, status: Status) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.flip(one, word)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is status


def test_other_regions_and_the_session_go_on(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    both, other = made.set_of(one, two), made.set_of(two)
    made.flip(one)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(both, two.address)).status is Status.REVOKED
    made.feed(quiet_in(made.launch(other, two.address), 5) * 4 + sync(6))
    assert tags(made) == [5] * 4
    assert made.session.lost is None


def test_a_cancelled_region_is_refused_until_its_cancel_is_taken_back(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.flip(one, RegionWord.CANCELLED)
    for _ in range(3):
        assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.CANCELLED
    made.activate(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 5))
    assert tags(made) == [5]
    made.flip(one, RegionWord.REVOKED)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.REVOKED


def test_a_deadline_ends_a_region_without_a_broker(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 3)
    passed_ns = time.monotonic_ns()
    made.activate(one, passed_ns)
    failure = made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address))
    assert (failure.status, failure.flipped_ns) == (Status.LEASE_EXPIRED, passed_ns)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.FENCED


def test_a_deadline_that_passes_while_launches_come_stops_them(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    soon_ns = time.monotonic_ns() + 20_000_000
    made.activate(one, soon_ns)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 3)
    while time.monotonic_ns() < soon_ns:
        pass
    made.feed(quiet_in(made.launch(chosen, one.address), 2) * 3)
    assert 2 not in tags(made)
    assert made.refused(Opcode.SYNC, Empty()).status is Status.LEASE_EXPIRED


def test_a_region_in_a_slot_that_was_another_ones_is_not_meant(made: RegionRig) -> None:
    one = made.open(slot=3)
    chosen = made.set_of(one)
    made.flip(one)
    other = made.open(slot=3, number=2)
    failure = made.refused(Opcode.LAUNCH_IN, made.launch(chosen, other.address))
    assert (failure.status, failure.region) == (Status.FENCED, one.region_id)
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(other), other.address))


def test_no_launch_begins_after_the_look_that_sees_the_flip(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is revoked while a launch is being queued: none behind it begins, though all have arrived."""
    one = made.open()
    chosen = made.set_of(one)
    launch = made.context.launch

    def flip_at_ten(*shape: Any) -> None:
        launch(*shape)
        if shape[-1] == 10:
            made.flip(one)

    monkeypatch.setattr(made.context, "launch", flip_at_ten)
    frames = [quiet_in(made.launch(chosen, one.address, number), number) for number in range(1, 40)]
    made.feed(b"".join(frames) + sync(40))
    assert tags(made) == list(range(1, 11))
    failure = made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address))
    assert failure.status is Status.FENCED, "the SYNC was told"


def test_a_stream_or_a_set_in_use_for_the_first_time_is_noted(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    first, second = made.set_of(one), made.set_of(one, two)
    known = {region.region_id: region for region in made.session._gate.regions.values()}
    made.feed(quiet_in(made.launch(first, one.address), 1) * 3)
    reply = made.ask(Opcode.STREAM_CREATE, Empty())
    assert isinstance(reply, Handle)
    made.send(Opcode.STREAM_SELECT, reply, quiet=True)
    made.feed(quiet_in(made.launch(second, one.address), 2) * 3)
    assert known[one.region_id].streams | known[one.region_id].marks.keys() == {0, reply.handle}
    assert known[two.region_id].streams == {reply.handle}


def test_launches_are_told_to_the_broker_once_each_within_bounds(
    made: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_operations, "MAX_REPEATS", 2)
    one = made.open()
    chosen = made.set_of(one)
    made.flip(one, flipped_ns=55)
    for position in range(9):
        made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address, position))
    told = made.told()
    assert [type(message) for message in told] == [ForwardRevokedReport] * 3
    first = told[0]
    assert isinstance(first, ForwardRevokedReport)
    assert (first.region_id, first.status, first.kernel) == (one.region_id, -Status.REVOKED, "scale")
    assert (first.site, first.position, first.flipped_ns) == (0, 0, 55)
    assert first.flipped_ns <= first.seen_ns <= first.told_ns <= time.monotonic_ns()


def test_a_refusal_is_reported_with_its_reply_or_soon_without_one(
    made: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.flip(one, flipped_ns=55)
    monkeypatch.setattr(region_operations, "REPORT_WAIT_NS", 1 << 62)
    made.send(Opcode.LAUNCH_IN, made.launch(chosen, one.address), quiet=True)
    assert made.told() == [], "the tenant is about to ask"
    assert made.session.regions.poll_ms(0) == 1
    assert made.refused(Opcode.SYNC, Empty()).region == one.region_id
    (told,) = made.told()
    assert isinstance(told, ForwardRevokedReport)
    assert told.told_ns >= told.seen_ns
    monkeypatch.setattr(region_operations, "REPORT_WAIT_NS", 0)
    made.send(Opcode.LAUNCH_IN, made.launch(chosen, one.address), quiet=True)
    (told,) = made.told()
    assert isinstance(told, ForwardRevokedReport)
    assert told.told_ns == 0, "it has not asked"
    assert made.session.regions.poll_ms(0) is None


def test_a_client_s_refusal_is_reported_as_the_worker_s_own(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    refusal = RegionRefusal(one.slot, one.number, "scale", 7)
    made.ask(Opcode.REGION_REFUSED, refusal)
    assert made.told() == [], "it goes on here, whatever the client says"
    made.flip(one, flipped_ns=55)
    made.ask(Opcode.REGION_REFUSED, refusal)
    made.ask(Opcode.REGION_REFUSED, RegionRefusal(one.slot, one.number + 1, "scale", 7))
    (told,) = made.told()
    assert isinstance(told, ForwardRevokedReport)
    assert (told.region_id, told.status, told.kernel) == (one.region_id, -Status.REVOKED, "scale")
    assert (told.position, told.flipped_ns) == (7, 55)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.FENCED


def test_the_site_counts_from_the_last_wait(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    launch = quiet_in(made.launch(chosen, one.address), 1)
    made.feed(launch * 5 + sync(2) + launch * 2)
    made.flip(one)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).site == 2


def test_copies_look_at_the_regions_word(made: RegionRig) -> None:
    one = made.open()
    made.ask(Opcode.MEM_WRITE, MemWrite(one.address, 0, b"abcd"))
    made.ask(Opcode.MEM_READ, MemRead(one.address, 0, 4))
    made.flip(one, RegionWord.FREED)
    assert made.refused(Opcode.MEM_WRITE, MemWrite(one.address, 0, b"abcd")).status is Status.LEASE_FREED
    failure = made.refused(Opcode.MEM_READ, MemRead(one.address, 0, 4))
    assert (failure.status, failure.region) == (Status.FENCED, one.region_id)


def test_a_region_is_not_freed_as_memory(made: RegionRig) -> None:
    one = made.open()
    failure = made.refused(Opcode.MEM_FREE, Handle(one.address))
    assert failure.status is Status.INVALID_HANDLE
    assert "lease id" in failure.hint


def test_regions_are_charged_to_the_slice(made: RegionRig) -> None:
    made.open(size_bytes=8 * GRANULE)
    assert made.page.counter(Counter.ALLOCATED_BYTES) == 8 * GRANULE
    assert made.refused(Opcode.MEM_ALLOC, MemAlloc((1 << 20) - 7 * GRANULE)).status is Status.ALLOC_FAILED


# --- sets ---


def test_unknown_regions_and_sets_are_refused(made: RegionRig) -> None:
    one = made.open()
    for ref in (RegionRef(one.slot, 2), RegionRef(one.slot + 1, 1), RegionRef(65535, 1)):
        failure = made.refused(Opcode.REGION_SET, RegionSet((ref,)))
        assert failure.status is Status.INVALID_HANDLE
    assert made.refused(Opcode.REGION_SET, RegionSet(())).status is Status.INVALID_REQUEST
    chosen = made.set_of(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 2)
    for handle in (0, chosen + 1, 2**64 - 1):
        assert made.refused(Opcode.LAUNCH_IN, made.launch(handle, one.address)).status is Status.INVALID_HANDLE


def test_each_launch_is_looked_at_by_its_own_set(made: RegionRig) -> None:
    """A loop in one set, with a launch in it that names an ended set, another that names none there is."""
    one, two = made.open(), made.open()
    chosen, other = made.set_of(one), made.set_of(two)
    made.flip(two)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 5)
    for wrong, status in ((other, Status.REVOKED), (0, Status.INVALID_HANDLE), (1 << 56, Status.INVALID_HANDLE)):
        made.feed(quiet_in(made.launch(chosen, one.address), 2) * 3 + quiet_in(made.launch(wrong, one.address), 3))
        assert made.refused(Opcode.SYNC, Empty()).status is status
    assert tags(made) == [1] * 5 + [2] * 9


def test_a_freed_set_is_no_set(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 3)
    made.ask(Opcode.REGION_SET_FREE, Handle(chosen))
    made.feed(quiet_in(made.launch(chosen, one.address), 2))
    assert made.refused(Opcode.SYNC, Empty()).status is Status.INVALID_HANDLE
    assert made.refused(Opcode.REGION_SET_FREE, Handle(chosen)).status is Status.INVALID_HANDLE
    assert tags(made) == [1, 1, 1]


def test_sets_and_what_they_name_are_bounded(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made.open()
    monkeypatch.setattr(region_operations, "MAX_REGION_SETS", 3)
    monkeypatch.setattr(region_operations, "MAX_SET_MEMBERS", 4)
    first = made.set_of(one, one, one)
    assert made.refused(Opcode.REGION_SET, RegionSet((one.ref, one.ref))).status is Status.BUSY
    made.ask(Opcode.REGION_SET_FREE, Handle(first))
    for _ in range(3):
        made.set_of(one)
    assert made.refused(Opcode.REGION_SET, RegionSet((one.ref,))).status is Status.BUSY


# --- launches without a set ---


@pytest.mark.parametrize("is_native", [False, True])
def test_a_session_may_require_a_set(is_native: bool) -> None:
    with region_rig(is_native=is_native, regions_required=True) as made:
        one = made.open()
        chosen = made.set_of(one)
        launch = made.launch(chosen, one.address)
        same = (made.module, "scale", 1, 1, 1, 32, 1, 1, 0, launch.args, SIZES)
        plain = Launch(*same)
        made.feed(quiet_in(launch, 1) * 2 + quiet(plain, 2))
        failure = made.refused(Opcode.SYNC, Empty())
        assert failure.status is Status.LAUNCH_FAILED
        assert "region set" in failure.hint
        with_attributes = LaunchWith(*same, region_set=0, position=0, flags=0, cluster_x=0, cluster_y=0, cluster_z=0)
        assert made.refused(Opcode.LAUNCH_WITH, with_attributes).status is Status.LAUNCH_FAILED
        assert tags(made) == [1, 1]


def test_launches_with_and_without_a_set_alternate(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    launch = made.launch(chosen, one.address)
    plain = Launch(made.module, "scale", 1, 1, 1, 32, 1, 1, 0, launch.args, SIZES)
    made.feed(b"".join(quiet_in(launch, n) + quiet(plain, n) for n in range(1, 10)))
    assert tags(made) == [n for n in range(1, 10) for _ in range(2)]


def test_an_address_is_released_once_its_memory_is_gone(made: RegionRig) -> None:
    one = made.open()
    assert made.refused(Opcode.REGION_RELEASE, Handle(one.address)).status is Status.BUSY
    made.flip(one)
    made.session.regions.end(EndRegionOrder(one.region_id, 1000))
    made.told()
    made.ask(Opcode.REGION_RELEASE, Handle(one.address))
    assert made.context.released == [one.address]
    assert made.told() == [RegionReleasedReport(one.region_id)]
    assert made.page.counter(Counter.ALLOCATED_BYTES) == 0
    assert made.refused(Opcode.REGION_RELEASE, Handle(one.address)).status is Status.INVALID_HANDLE
