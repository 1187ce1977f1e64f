"""Launches that come as expected are taken without parsing; nothing else may differ from handling them one by one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.cpu.context import CpuContext
from gpulease.daemon.drivers.cpu.driver import CpuDriver
from gpulease.daemon.drivers.interface import Dim3, Kernel, LaunchRejected
from gpulease.daemon.worker.ledger import Ledger
from gpulease.daemon.worker.page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.worker.session import Session
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Empty, Launch
from gpulease.protocol.opcodes import Flag, Opcode, Status
from helpers.kernels import TRANSFORM

LEASE = 0x77
SIZES = (8, 4, 4)
MINUTE_NS = 60_000_000_000


@dataclass
class Recording:
    """The embedded driver's context; what it is asked to launch is written down, and refused on demand."""

    context: CpuContext
    launches: list[tuple[str, Dim3, Dim3, bytes, int]] = field(default_factory=list)
    refuse_tag: int = 0

    def launch(self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes, tag: int) -> None:
        if tag == self.refuse_tag:
            raise LaunchRejected("refused for the test")
        self.launches.append((kernel.name, grid, block, params, tag))
        self.context.launch(kernel, grid, block, shared_bytes, params, tag)

    def __getattr__(self, name: str) -> object:
        return getattr(self.context, name)


@dataclass
class Rig:
    session: Session
    page: BrokerPage
    context: Recording
    address: int
    module: int
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_PAYLOAD_BYTES))
    replies: list[bytes] = field(default_factory=list)

    def feed(self, stream: bytes, *, expect_launches: bool) -> None:
        self.reader.receive_data(stream)
        while True:
            if expect_launches:
                self.session.take_launches(self.reader)
            frame = self.reader.next_frame()
            if frame is None:
                return
            reply = self.session.handle(frame)
            if reply is not None:
                self.replies.append(bytes(reply))


@contextmanager
def rig() -> Iterator[Rig]:
    page = BrokerPage()
    page.set_deadline(time.monotonic_ns() + MINUTE_NS, 1)
    view = WorkerPage(page.fd)
    context = Recording(CpuDriver().open_context("GPU-0", 1 << 20))
    ledger = Ledger(1 << 20)
    session = Session(LEASE, context, ledger, view)  # type: ignore[arg-type]  # all but launch is forwarded
    address = context.context.mem_alloc(4096)
    ledger.add_allocation(address, 4096)
    module = ledger.add_module(context.context.module_load(TRANSFORM), 1)
    try:
        yield Rig(session, page, context, address, module)
    finally:
        context.context.close()
        view.close()
        page.close()


@pytest.fixture(name="made")
def _made() -> Iterator[Rig]:
    with rig() as made:
        yield made


def args(made: Rig, count: int) -> bytes:
    return made.address.to_bytes(8, "little") + count.to_bytes(4, "little") + b"\0\0\x80\x3f"


def launch_of(made: Rig, kernel: str = "scale", blocks: int = 1, count: int = 8) -> Launch:
    return Launch(made.module, kernel, blocks, 1, 1, 32, 1, 1, 0, args(made, count), SIZES)


def quiet(launch: Launch, request_id: int, session_id: int = LEASE) -> bytes:
    return build_frame(
        Opcode.LAUNCH, build_body(launch), request_id=request_id, session_id=session_id, flags=Flag.QUIET
    )


def sync(request_id: int) -> bytes:
    return build_frame(Opcode.SYNC, build_body(Empty()), request_id=request_id, session_id=LEASE)


KINDS = st.sampled_from(["scale", "bias", "scale wide", "foreign", "no kernel", "truncated sizes", "sync"])


def stream_of(made: Rig, kinds: list[str]) -> bytes:
    frames = []
    for number, kind in enumerate(kinds, start=1):
        plain = launch_of(made, count=number)
        match kind:
            case "scale":
                frames.append(quiet(plain, number))
            case "bias":
                frames.append(quiet(replace(plain, kernel="bias"), number))
            case "scale wide":
                frames.append(quiet(replace(plain, grid_x=2), number))
            case "foreign":
                frames.append(quiet(plain, number, LEASE + 1))
            case "no kernel":
                frames.append(quiet(replace(plain, kernel="scald"), number))
            case "truncated sizes":
                frames.append(quiet(replace(plain, arg_sizes=SIZES[:2]), number))
            case _:
                frames.append(sync(number))
    return b"".join(frames)


@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(KINDS, max_size=40), cuts=st.lists(st.integers(1, 400), max_size=12))
def test_expected_launches_are_done_as_any_other(kinds: list[str], cuts: list[int]) -> None:
    with rig() as one_by_one, rig() as expecting:
        one_by_one.feed(stream_of(one_by_one, kinds), expect_launches=False)
        rest = stream_of(expecting, kinds)
        for cut in cuts:
            expecting.feed(rest[:cut], expect_launches=True)
            rest = rest[cut:]
        expecting.feed(rest, expect_launches=True)
        assert expecting.replies == one_by_one.replies
        assert [entry[:3] + entry[4:] for entry in expecting.context.launches] == [
            entry[:3] + entry[4:] for entry in one_by_one.context.launches
        ]
        # The parameter buffers differ in the address alone.
        assert [entry[3][8:] for entry in expecting.context.launches] == [
            entry[3][8:] for entry in one_by_one.context.launches
        ]
        # When each of them last looked around is its own.
        for counter in set(Counter) - {Counter.LOOKED_NS}:
            assert expecting.page.counter(counter) == one_by_one.page.counter(counter), counter.name


def test_a_loop_is_taken_without_a_frame_left_for_handling(made: Rig) -> None:
    loop = [quiet(launch_of(made, kernel), 1 + number) for number, kernel in enumerate(["scale", "bias"] * 20)]
    made.feed(b"".join(loop[:4]), expect_launches=True)
    made.reader.receive_data(b"".join(loop[4:]))
    made.session.take_launches(made.reader)
    assert not made.reader.is_mid_frame
    assert [entry[0] for entry in made.context.launches] == ["scale", "bias"] * 20
    assert [entry[4] for entry in made.context.launches] == list(range(1, 41))


def test_an_expected_launch_of_a_lease_that_is_over_is_not_done(made: Rig) -> None:
    made.feed(quiet(launch_of(made), 1), expect_launches=True)
    made.page.refuse(Status.REVOKED)
    made.feed(quiet(launch_of(made), 2) * 3, expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1]
    made.page.refuse(Status.OK)
    made.page.set_deadline(time.monotonic_ns(), 2)
    made.feed(quiet(launch_of(made), 3), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1]


def test_a_refused_expected_launch_is_kept_and_what_is_behind_it_skipped(made: Rig) -> None:
    made.context.refuse_tag = 4
    made.feed(b"".join(quiet(launch_of(made), number) for number in range(1, 9)) + sync(9), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1, 2, 3]
    assert len(made.replies) == 1
    assert b"refused for the test" in made.replies[0]
    assert made.page.counter(Counter.LAUNCHES) == 3
    made.feed(quiet(launch_of(made), 10) + sync(11), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1, 2, 3, 10]


def test_a_kernel_refused_at_its_first_launch_is_charged_again(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(made.session._ledger, "keep", charged.append)
    made.context.refuse_tag = 2
    made.feed(b"".join(quiet(launch_of(made), number) for number in (1, 1, 1)), expect_launches=True)
    assert len(charged) == 1
    wide = launch_of(made, blocks=2)
    made.feed(quiet(wide, 2) + sync(3) + quiet(wide, 4) * 2 + sync(5), expect_launches=True)
    assert len(charged) == 3
    assert [entry[4] for entry in made.context.launches] == [1, 1, 1, 4, 4]


def test_launches_stop_at_the_look_that_sees_the_word(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word flips while a launch is being queued: not one more begins, though they are all there."""
    launch = made.context.launch

    def flip_at_ten(kernel: Kernel, grid: Dim3, block: Dim3, shared: int, params: bytes, tag: int) -> None:
        launch(kernel, grid, block, shared, params, tag)
        if tag == 10:
            made.page.refuse(Status.REVOKED)

    monkeypatch.setattr(made.context, "launch", flip_at_ten)
    made.feed(b"".join(quiet(launch_of(made), number) for number in range(1, 100)) + sync(100), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == list(range(1, 11))
    assert len(made.replies) == 1


def test_an_unloaded_module_is_expected_no_more(made: Rig) -> None:
    made.feed(quiet(launch_of(made), 1), expect_launches=True)
    unload = build_frame(Opcode.MODULE_UNLOAD, made.module.to_bytes(8, "big"), request_id=2, session_id=LEASE)
    made.feed(unload + quiet(launch_of(made), 3) + sync(4), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1]
    assert b"is not a loaded module" in made.replies[-1]
