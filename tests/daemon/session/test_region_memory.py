"""The memory of regions: opened, taken away once nothing uses it, reported to whichever broker asks."""

import os
import time
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.contract.messages import (
    EndRegionOrder,
    ForwardRevokedReport,
    OpenRegionOrder,
    RegionEndedReport,
    RegionOpenedReport,
    RegionRefusedReport,
    RegionStuckReport,
    ResizeSliceOrder,
    SliceResizedReport,
)
from gpulease.daemon.drivers.interface import DriverError, DriverKernel, KernelFault
from gpulease.daemon.ptx.image import CpuKernel
from gpulease.daemon.session import region_memory
from gpulease.protocol.codec import build_body
from gpulease.protocol.messages import (
    Empty,
    GraphCreate,
    GraphLaunch,
    GraphLaunchIn,
    GraphNode,
    Handle,
    Launch,
    MemAlloc,
    MemRead,
    MemWrite,
)
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.session_words import RegionWord
from helpers.region_rig import GRANULE, KEPT, SLICE, Opened, PageWriter, RegionRig, quiet_in, region_rig
from helpers.session_rig import SIZES

GRACE_MS = 60_000


@pytest.fixture(name="made")
def _made() -> Iterator[RegionRig]:
    with region_rig() as made:
        yield made


@pytest.fixture(autouse=True)
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "QUIET_WAIT_NS", 1 << 60)
    monkeypatch.setattr(region_memory, "REFUSAL_WAIT_NS", 0)


def end(made: RegionRig, region: Opened, grace_ms: int = GRACE_MS, word: RegionWord = RegionWord.REVOKED) -> None:
    made.flip(region, word)
    made.session.regions.end(EndRegionOrder(region.region_id, grace_ms))


def ended(region: Opened, size_bytes: int = GRANULE) -> RegionEndedReport:
    return RegionEndedReport(region.region_id, size_bytes - KEPT, KEPT, size_bytes - KEPT)


def other_broker(made: RegionRig, *known: Opened) -> PageWriter:
    """Another broker's page takes the place of the first one's; it has these regions, which do not go on yet."""
    writer = PageWriter()
    for region in known:
        writer.set(region.slot, region.number, RegionWord.NONE, 0)
    fd = writer.reading_fd()
    made.session.regions.use_page(fd)
    os.close(fd)
    earlier, made.writer = made.writer, writer
    earlier.close()
    return writer


# --- opening ---


def test_opening_again_gives_the_same_address(made: RegionRig) -> None:
    one = made.open()
    made.session.regions.open(OpenRegionOrder(one.region_id, one.slot, one.number, GRANULE))
    assert made.told() == [RegionOpenedReport(one.region_id, one.address)]
    assert len(made.context.opened) == 1


@pytest.mark.parametrize(
    ("slot", "number", "size_bytes", "said"),
    [
        (0, 1, GRANULE + 1, "must have a multiple"),
        (256, 1, GRANULE, "must have a multiple"),
        (0, 1, 2 * SLICE, "of the slice"),
        (0, 1, 0, "0 bytes"),
    ],
)
def test_regions_that_can_not_be_are_refused(
    made: RegionRig, slot: int, number: int, size_bytes: int, said: str
) -> None:
    made.session.regions.open(OpenRegionOrder(5, slot, number, size_bytes))
    (answer,) = made.told()
    assert isinstance(answer, RegionRefusedReport)
    assert said in answer.reason
    assert not made.context.opened


def test_two_regions_never_have_one_slot_and_number(made: RegionRig) -> None:
    one = made.open()
    made.session.regions.open(OpenRegionOrder(one.region_id + 1, one.slot, one.number, GRANULE))
    assert isinstance(made.told()[0], RegionRefusedReport)


def test_addresses_that_are_not_released_are_bounded(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "MAX_MAPPED_REGIONS", 2)
    end(made, made.open())
    made.told()
    made.open()
    made.session.regions.open(OpenRegionOrder(5, 9, 1, GRANULE))
    (answer,) = made.told()
    assert isinstance(answer, RegionRefusedReport)
    assert "release" in answer.reason


# --- the end ---


def test_the_memory_of_an_idle_region_goes_at_once(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    end(made, one)
    assert made.told() == [ended(one)]
    assert made.context.ended == [one.address]
    assert made.page.counter(Counter.ALLOCATED_BYTES) == GRANULE + KEPT
    made.ask(Opcode.MEM_WRITE, MemWrite(two.address, 0, b"abcd"))
    assert made.refused(Opcode.MEM_READ, MemRead(one.address, 0, 4)).status is Status.REVOKED


def test_what_names_the_region_is_waited_for_and_nothing_else_stops(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    made.context.holds = True
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    end(made, one)
    assert [ticket.stream for ticket in made.context.tickets] == [0]
    for _ in range(3):
        made.session.regions.advance()
        made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(two), two.address))
    assert made.context.ended == []
    made.context.finish()
    made.session.regions.advance()
    assert made.context.ended == [], "what else runs is waited for, too"
    made.context.finish()
    made.session.regions.advance()
    assert made.context.ended == [one.address]
    assert made.told() == [ended(one)]
    assert made.session.regions.poll_ms(time.monotonic_ns()) is None


def test_copies_are_waited_for_in_their_streams(made: RegionRig) -> None:
    one = made.open()
    stream = made.ask(Opcode.STREAM_CREATE, Empty())
    assert isinstance(stream, Handle)
    made.ask(Opcode.STREAM_SELECT, stream)
    made.ask(Opcode.MEM_WRITE, MemWrite(one.address, 0, b"abcd"))
    made.context.holds = True
    end(made, one)
    assert [ticket.stream for ticket in made.context.tickets] == [stream.handle]


def test_a_destroyed_streams_launches_are_waited_for(made: RegionRig) -> None:
    one = made.open()
    stream = made.ask(Opcode.STREAM_CREATE, Empty())
    assert isinstance(stream, Handle)
    made.ask(Opcode.STREAM_SELECT, stream)
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    made.context.holds = True
    made.ask(Opcode.STREAM_DESTROY, stream)
    made.context.holds = False
    end(made, one)
    made.session.regions.advance()
    assert made.context.ended == []
    made.context.finish(stream.handle)
    made.session.regions.advance()
    assert made.context.ended == [one.address]


def test_a_launch_that_does_not_end_within_the_grace_is_told(made: RegionRig) -> None:
    one = made.open()
    made.context.holds = True
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    end(made, one, grace_ms=0)
    (answer,) = made.told()
    assert isinstance(answer, RegionStuckReport)
    assert "a launch that names it" in answer.reason
    made.context.finish()
    made.session.regions.advance()
    assert made.context.ended == []
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    assert made.told() == [answer]


def test_other_launches_are_waited_for_a_bounded_time(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "QUIET_WAIT_NS", 0)
    one = made.open()
    made.context.holds = True
    end(made, one)
    assert made.context.ended == [one.address]
    assert made.context.tickets, "it did look"


def test_one_call_takes_one_regions_memory_away(made: RegionRig) -> None:
    all_of_them = [made.open() for _ in range(4)]
    made.context.holds = True
    chosen = made.set_of(*all_of_them)
    made.ask(Opcode.LAUNCH_IN, made.launch(chosen, all_of_them[0].address))
    for region in all_of_them:
        end(made, region)
    made.context.holds = False
    made.context.finish()
    for count in range(1, 5):
        made.session.regions.advance()
        assert len(made.context.ended) == count


def test_the_next_launch_is_refused_before_the_memory_is_taken_away(
    made: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_memory, "REFUSAL_WAIT_NS", 1 << 60)
    one = made.open()
    launch = made.launch(made.set_of(one), one.address)
    made.ask(Opcode.LAUNCH_IN, launch)
    end(made, one)
    assert made.context.ended == []
    assert made.refused(Opcode.LAUNCH_IN, launch).status is Status.REVOKED
    made.session.regions.advance()
    assert made.context.ended == [one.address]


def test_a_quiet_launchs_refusal_is_reported_before_the_memory_is_taken_away(
    made: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_memory, "REFUSAL_WAIT_NS", 1 << 60)
    one = made.open()
    launch = made.launch(made.set_of(one), one.address)
    made.ask(Opcode.LAUNCH_IN, launch)
    end(made, one)
    made.feed(quiet_in(launch, 7))
    made.session.regions.advance()
    assert made.context.ended == []
    assert made.refused(Opcode.SYNC, Empty()).status is Status.REVOKED
    made.session.regions.advance()
    assert made.context.ended == [one.address]


def test_a_region_that_no_launch_named_waits_for_no_refusal(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "REFUSAL_WAIT_NS", 1 << 60)
    one = made.open()
    end(made, one)
    assert made.context.ended == [one.address]


def test_the_card_zeroes_what_stays_before_the_memory_is_taken_away(made: RegionRig) -> None:
    one = made.open()
    made.context.is_zeroed = False
    end(made, one)
    assert (made.context.wiped, made.context.ended) == ([one.address], [])
    made.context.is_zeroed = True
    made.session.regions.advance()
    assert made.context.ended == [one.address]


def test_a_region_is_told_open_once_the_card_has_zeroed_it(made: RegionRig) -> None:
    made.context.is_zeroed = False
    made.session.regions.open(OpenRegionOrder(7, 3, 1, GRANULE))
    assert made.told() == []
    assert made.session.regions.poll_ms(time.monotonic_ns()) is not None
    made.context.is_zeroed = True
    made.session.regions.advance()
    (answer,) = made.told()
    assert isinstance(answer, RegionOpenedReport)


def test_an_end_waits_for_no_launch_behind_the_last_one_that_named_the_region(
    made: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_memory, "QUIET_WAIT_NS", 0)
    one, two = made.open(), made.open()
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    others = made.set_of(two)
    made.ask(Opcode.LAUNCH_IN, made.launch(others, two.address))
    made.context.holds = True
    made.ask(Opcode.LAUNCH_IN, made.launch(others, two.address))
    end(made, two)
    assert made.context.ended == []
    end(made, one)
    assert made.context.ended == [one.address]


def test_memory_that_can_not_be_taken_away_is_told(made: RegionRig) -> None:
    one = made.open()
    made.context.end_error = DriverError("unmapping failed")
    end(made, one)
    (answer,) = made.told()
    assert isinstance(answer, RegionStuckReport)
    assert "unmapping failed" in answer.reason
    assert made.page.counter(Counter.ALLOCATED_BYTES) == GRANULE


def test_a_fault_that_the_end_meets_is_the_tenants_to_hear(made: RegionRig) -> None:
    one = made.open()
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    made.context.mark_fault = KernelFault("a stray store", kernel="scale", tag=1)
    end(made, one)
    assert made.told() == [ended(one)]
    failure = made.refused(Opcode.SYNC, Empty())
    assert (failure.status, failure.kernel) == (Status.SYNC_FAILED, "scale")
    made.ask(Opcode.SYNC, Empty())


def test_a_fault_is_told_behind_the_failure_before_it(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    chosen = made.set_of(one, two)
    made.ask(Opcode.LAUNCH_IN, made.launch(chosen, two.address))
    made.flip(one)
    made.feed(quiet_in(made.launch(chosen, two.address), 9))
    made.context.mark_fault = KernelFault("a stray store", kernel="scale", tag=1)
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    assert made.refused(Opcode.SYNC, Empty()).status is Status.REVOKED
    assert made.refused(Opcode.SYNC, Empty()).status is Status.SYNC_FAILED
    made.ask(Opcode.SYNC, Empty())


def test_an_end_is_answered_again_and_an_unknown_regions_too(made: RegionRig) -> None:
    one = made.open()
    end(made, one)
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    made.session.regions.end(EndRegionOrder(12345, GRACE_MS))
    assert made.told() == [ended(one), ended(one), RegionEndedReport(12345, 0, 0, 0)]
    assert made.context.ended == [one.address]


def test_a_region_ends_though_its_word_says_nothing(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    assert made.told() == [ended(one)]
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.REVOKED


@pytest.mark.parametrize("word", [RegionWord.CANCELLED, RegionWord.NONE])
def test_a_word_that_is_no_end_does_not_stay(made: RegionRig, word: RegionWord) -> None:
    one = made.open()
    chosen = made.set_of(one)
    end(made, one, word=word)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.REVOKED
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.FENCED


def test_the_loop_is_awake_while_an_end_is_pending(made: RegionRig) -> None:
    one = made.open()
    made.context.holds = True
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(one), one.address))
    end(made, one)
    begun_ns = made.session.regions._spin_until_ns - region_memory.SPIN_NS
    assert made.session.regions.poll_ms(begun_ns) == 0
    assert made.session.regions.poll_ms(begun_ns + region_memory.SPIN_NS) == 1


def test_a_context_that_had_a_region_serves_no_other_lease(made: RegionRig) -> None:
    one = made.open()
    end(made, one)
    made.ask(Opcode.REGION_RELEASE, Handle(one.address))
    with pytest.raises(DriverError, match="never be used again"):
        made.session.release(lambda: None)


# --- graphs ---


def graph_of(made: RegionRig, address: int) -> int:
    args = address.to_bytes(8, "little") + (8).to_bytes(4, "little") + b"\0\0\x80\x3f"
    launch = Launch(made.module, "scale", 1, 1, 1, 32, 1, 1, 0, args, SIZES)
    node = GraphNode(Opcode.LAUNCH, build_body(launch))
    reply = made.ask(Opcode.GRAPH_CREATE, GraphCreate((node, node), (address,), (), ()))
    assert isinstance(reply, Handle)
    return reply.handle


def test_a_graph_is_looked_at_before_it_begins(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    chosen, graph = made.set_of(one, two), graph_of(made, two.address)
    made.ask(Opcode.GRAPH_LAUNCH_IN, GraphLaunchIn(graph, b"", chosen, 5))
    assert made.page.counter(Counter.LAUNCHES) == 2
    made.flip(one, flipped_ns=33)
    failure = made.refused(Opcode.GRAPH_LAUNCH_IN, GraphLaunchIn(graph, b"", chosen, 6))
    assert (failure.status, failure.region, failure.position) == (Status.REVOKED, one.region_id, 6)
    assert (failure.site, failure.kernel) == (2, "")
    assert made.page.counter(Counter.LAUNCHES) == 2
    assert [type(message) for message in made.told()] == [ForwardRevokedReport]


def test_a_graph_is_checked_after_its_kernels_are_optimised(made: RegionRig, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = made.open(), made.open()
    chosen, graph = made.set_of(one), graph_of(made, two.address)
    kernel = made.session._resources.ledger.module(made.module).kernels["scale"]
    assert isinstance(kernel, CpuKernel)
    kernel.running.first_code_ns = -1

    def compile_kernel(kernel: DriverKernel, threads: int) -> bool:
        made.flip(one, flipped_ns=33)
        return True

    monkeypatch.setattr(made.context, "compile_kernel", compile_kernel, raising=False)
    failure = made.refused(Opcode.GRAPH_LAUNCH_IN, GraphLaunchIn(graph, b"", chosen, 6))
    assert (failure.status, failure.region) == (Status.REVOKED, one.region_id)
    assert made.page.counter(Counter.LAUNCHES) == 0


def test_a_graph_s_own_region_is_refused_with_the_position_as_well(made: RegionRig) -> None:
    """A region of the set that ends between the set's check and the graph's is found by the second."""
    one, two = made.open(), made.open()
    chosen, graph = made.set_of(one), graph_of(made, two.address)
    made.flip(two, flipped_ns=33)
    failure = made.refused(Opcode.GRAPH_LAUNCH_IN, GraphLaunchIn(graph, b"", chosen, 6))
    assert (failure.status, failure.region, failure.position) == (Status.REVOKED, two.region_id, 6)
    (report,) = made.told()
    assert isinstance(report, ForwardRevokedReport)
    assert report.position == 6


def test_a_graph_that_names_an_ended_region_is_void(made: RegionRig) -> None:
    one = made.open()
    graph = graph_of(made, one.address)
    made.ask(Opcode.GRAPH_LAUNCH, GraphLaunch(graph, b""))
    made.flip(one)
    assert made.refused(Opcode.GRAPH_LAUNCH, GraphLaunch(graph, b"")).status is Status.REVOKED
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    failure = made.refused(Opcode.GRAPH_LAUNCH, GraphLaunch(graph, b""))
    assert failure.status is Status.INVALID_HANDLE
    assert "has ended" in failure.message
    made.ask(Opcode.GRAPH_DESTROY, Handle(graph))


def test_graphs_need_a_set_too_where_one_is_required() -> None:
    with region_rig(regions_required=True) as made:
        one = made.open()
        graph, chosen = graph_of(made, one.address), made.set_of(one)
        assert made.refused(Opcode.GRAPH_LAUNCH, GraphLaunch(graph, b"")).status is Status.LAUNCH_FAILED
        made.ask(Opcode.GRAPH_LAUNCH_IN, GraphLaunchIn(graph, b"", chosen, 0))


# --- another broker ---


def test_a_region_that_goes_on_does_so_on_the_next_brokers_page(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 1) * 3)
    writer = other_broker(made, one)
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address)).status is Status.FENCED
    writer.epoch = 0
    made.activate(one)
    made.feed(quiet_in(made.launch(chosen, one.address), 2) * 3)
    assert [entry[4] for entry in made.context.launches] == [1] * 3 + [2] * 3


def test_a_region_that_had_ended_stays_ended_whatever_the_next_broker_writes(made: RegionRig) -> None:
    one, two = made.open(), made.open()
    chosen = made.set_of(one)
    made.flip(one, RegionWord.FREED, flipped_ns=9)
    other_broker(made, one, two)
    assert made.told() == [ended(one)], "its memory went unasked"
    made.activate(one)
    made.activate(two)
    failure = made.refused(Opcode.LAUNCH_IN, made.launch(chosen, one.address))
    assert (failure.status, failure.flipped_ns) == (Status.LEASE_FREED, 9)
    assert made.refused(Opcode.MEM_READ, MemRead(one.address, 0, 1)).status is Status.FENCED
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(two), two.address))
    made.told()
    made.session.regions.end(EndRegionOrder(one.region_id, GRACE_MS))
    assert made.told() == [ended(one)]


def test_a_region_whose_time_had_passed_has_ended(made: RegionRig) -> None:
    one = made.open()
    made.activate(one, time.monotonic_ns())
    other_broker(made, one)
    assert made.told() == [ended(one)]


def test_a_region_that_the_next_broker_does_not_have_ends(made: RegionRig) -> None:
    lost, known = made.open(), made.open()
    used_bytes = made.ledger.used_bytes
    chosen = made.set_of(lost)
    other_broker(made, known)
    assert made.told() == [ended(lost)], "nobody else would ever give its bytes back"
    assert made.ledger.used_bytes == used_bytes - GRANULE + KEPT
    made.activate(known)
    made.ask(Opcode.LAUNCH_IN, made.launch(made.set_of(known), known.address))
    assert made.refused(Opcode.LAUNCH_IN, made.launch(chosen, lost.address)).status is Status.REVOKED


def test_no_page_is_no_change(made: RegionRig) -> None:
    one = made.open()
    chosen = made.set_of(one)
    fd = os.memfd_create("short")
    made.session.regions.use_page(fd)
    os.close(fd)
    made.ask(Opcode.LAUNCH_IN, made.launch(chosen, one.address))


# --- the slice ---


def test_a_slice_grows(made: RegionRig) -> None:
    made.session.regions.resize(ResizeSliceOrder(2 * SLICE))
    assert made.told() == [SliceResizedReport(2 * SLICE, "")]
    made.open(size_bytes=SLICE)
    made.ask(Opcode.MEM_ALLOC, MemAlloc(SLICE))


def test_a_slice_shrinks_to_what_is_not_taken_and_no_further(made: RegionRig) -> None:
    made.open(size_bytes=4 * GRANULE)
    made.session.regions.resize(ResizeSliceOrder(4 * GRANULE - 1))
    (answer,) = made.told()
    assert isinstance(answer, SliceResizedReport)
    assert answer.size_bytes == SLICE
    assert "free something" in answer.doubt
    made.session.regions.resize(ResizeSliceOrder(4 * GRANULE))
    assert made.told() == [SliceResizedReport(4 * GRANULE, "")]
    assert made.refused(Opcode.MEM_ALLOC, MemAlloc(1)).status is Status.ALLOC_FAILED
