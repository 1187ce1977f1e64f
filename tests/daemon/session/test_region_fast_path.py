"""Launches in regions that come as expected: native code, Python's reference and one by one do the same."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import EndRegionOrder, ForwardRevokedReport
from gpulease.daemon.session import region_memory
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Empty, Handle, Launch, MemWrite
from gpulease.protocol.opcodes import Flag, Opcode
from gpulease.protocol.session_words import ENDED_WORDS, RegionWord
from helpers.region_rig import Opened, RegionRig, quiet_in, region_rig
from helpers.session_rig import LEASE, SIZES, UNKNOWN_TO_NATIVE, quiet, sync, told

REGIONS = 3
FAR_NS = 1 << 62
SLOTS = st.integers(0, REGIONS - 1)
STATES = st.sampled_from([*map(int, RegionWord), 6, (1 << 32) - 1])
CHANGE = st.one_of(
    st.tuples(st.just("word"), SLOTS, STATES, st.booleans()),
    st.tuples(st.just("deadline"), SLOTS, st.sampled_from([0, 1, FAR_NS]), st.booleans()),
    st.tuples(st.just("number"), SLOTS, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("epoch"), SLOTS, st.just(0), st.booleans()),
)
# Mostly what native code takes: a loop of one kernel in one set.
KIND = st.one_of(
    st.just(("in", 0)),
    st.just(("in", 0)),
    st.tuples(st.just("in"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["in wide", "in by Python", "in bias"]), st.integers(0, 2)),
    st.just(("sync", 0)),
    st.tuples(st.sampled_from(["plain", "sync", "select", "foreign", "no kernel", "cut", "free", "write"]), SLOTS),
)
STEP = st.one_of(
    st.tuples(st.just("frames"), st.lists(KIND, max_size=25), st.integers(1, 500)),
    st.tuples(st.just("change"), CHANGE, st.just(0)),
    st.tuples(st.just("end"), SLOTS, st.just(0)),
    st.tuples(st.just("reopen"), SLOTS, st.integers(2, 3)),
)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "REFUSAL_WAIT_NS", 0)
    monkeypatch.setattr(region_memory, "QUIET_WAIT_NS", 1 << 60)


class Play:
    """One session that is played a list of steps."""

    def __init__(self, made: RegionRig, during: dict[int, tuple[str, int, int, bool]]) -> None:
        self.made, self.tag = made, 10
        made.context.does_them = False
        self.regions = [made.open() for _ in range(REGIONS)]
        self.words = [(1, int(RegionWord.ACTIVE), FAR_NS)] * REGIONS
        self.sets = [made.set_of(*chosen) for chosen in (self.regions, self.regions[:1], self.regions[1:])]
        stream = made.ask(Opcode.STREAM_CREATE, Empty())
        assert isinstance(stream, Handle)
        self.stream = stream.handle
        launch = made.context.launch

        def launch_and_change(*shape: Any) -> None:
            launch(*shape)
            if shape[-1] in during:
                self.change(*during[shape[-1]])

        made.context.launch = launch_and_change  # type: ignore[method-assign, assignment]  # any shape

    def change(self, what: str, slot: int, value: int, raises: bool) -> None:
        number, state, deadline_ns = self.words[slot]
        match what:
            case "word":
                state = value
            case "deadline":
                deadline_ns = value
            case "number":
                number = value
        self.words[slot] = (number, state, deadline_ns)
        self.made.writer.set(slot, number, state, deadline_ns, 5, raises=raises or what == "epoch")

    def frame(self, kind: str, which: int) -> bytes:
        made, self.tag = self.made, self.tag + 1
        tag = self.tag
        # Handles that there are, and some that there are not.
        chosen = self.sets[which] if which < len(self.sets) else which * 7
        launch = made.launch(chosen, self.regions[0].address, position=tag)
        plain = Launch(made.module, "scale", 1, 1, 1, 32, 1, 1, 0, launch.args, SIZES)
        match kind:
            case "in":
                return quiet_in(launch, tag)
            case "in wide":
                return quiet_in(replace(launch, grid_x=2), tag)
            case "in by Python":
                return quiet_in(replace(launch, grid_x=UNKNOWN_TO_NATIVE), tag)
            case "in bias":
                return quiet_in(replace(launch, kernel="bias"), tag)
            case "plain":
                return quiet(plain, tag)
            case "foreign":
                return quiet_in(launch, tag, LEASE + 1)
            case "no kernel":
                return quiet_in(replace(launch, kernel="scald"), tag)
            case "cut":
                payload = build_body(launch)[: -1 - which]
                return quieted(Opcode.LAUNCH_IN, payload, tag)
            case "select":
                return quieted(Opcode.STREAM_SELECT, build_body(Handle(self.stream * (which % 2))), tag)
            case "free":
                return quieted(Opcode.REGION_SET_FREE, build_body(Handle(chosen)), tag)
            case "write":
                return quieted(Opcode.MEM_WRITE, build_body(MemWrite(self.regions[which].address, 0, b"abcd")), tag)
        return sync(tag)

    def reopen(self, slot: int, number: int) -> None:
        self.change("number", slot, number, raises=True)
        region = Opened(0x2000 + self.tag, slot, number, 0)
        self.made.flip(region, RegionWord.NONE)


def quieted(op: int, payload: bytes, tag: int) -> bytes:
    return build_frame(op, payload, request_id=tag, session_id=LEASE, flags=Flag.QUIET)


def without_times(message: Message) -> Message:
    return replace(message, seen_ns=0, told_ns=0) if isinstance(message, ForwardRevokedReport) else message


def outcome(
    steps: list[Any],
    during: dict[int, tuple[str, int, int, bool]],
    scribbles: list[tuple[int, int]],
    *,
    is_native: bool,
    expect_launches: bool,
) -> tuple[object, ...]:
    """All that a session shows to the outside, without addresses and times."""
    end = ""
    with region_rig(is_native=is_native) as made:
        play = Play(made, during)
        try:
            for what, value, size in steps:
                match what:
                    case "frames":
                        stream = bytearray(b"".join(play.frame(*kind) for kind in value))
                        for place, bits in scribbles:
                            if place < len(stream):
                                stream[place] ^= bits
                        for start in range(0, len(stream), size):
                            made.feed(bytes(stream[start : start + size]), expect_launches=expect_launches)
                    case "change":
                        play.change(*value)
                    case "end":
                        number, state, _ = play.words[value]
                        if number != 1 or state not in ENDED_WORDS:
                            play.change("number", value, 1, raises=False)
                            play.change("word", value, RegionWord.REVOKED, raises=False)
                        made.session.regions.end(EndRegionOrder(play.regions[value].region_id, 1000))
                        made.session.regions.advance()
                    case _:
                        play.reopen(value, size)
        except FramingError as error:
            end = str(error)
        reports = [without_times(message) for message in (*made.told(), *made.session._gate.unreported)]
        rest = made.reader.end - made.reader.start
        replies = [hidden(reply, play.regions) for reply in made.replies]
        return end, rest, replies, reports, told(made)  # type: ignore[arg-type]  # it has what is looked at


def hidden(reply: bytes, regions: list[Opened]) -> bytes:
    """A reply without the addresses that it names."""
    for number, region in enumerate(regions):
        reply = reply.replace(f"{region.address:#x}".encode(), f"<{number}>".encode())
    return reply


@pytest.fixture(autouse=True, scope="module")
def _no_wait_for_a_refusal() -> Iterator[None]:
    """What comes first, a refusal or the end of its wait, depends on the host's speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_memory, "REFUSAL_WAIT_NS", 0)
        yield


# A word flips while the third of four launches begins: each way says that the refused one is number 3.
@example(steps=[("frames", [("in", 0)] * 4, 180)], during={13: ("word", 0, 0, True)}, scribbles=[])
@pytest.mark.exhaustive
@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(STEP, max_size=10),
    during=st.dictionaries(st.integers(10, 60), CHANGE, max_size=3),
    scribbles=st.one_of(st.just([]), st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), max_size=2)),
)
def test_native_code_and_python_do_the_same(
    steps: list[Any], during: dict[int, tuple[str, int, int, bool]], scribbles: list[tuple[int, int]]
) -> None:
    by_one = outcome(steps, during, scribbles, is_native=False, expect_launches=False)
    assert outcome(steps, during, scribbles, is_native=False, expect_launches=True) == by_one
    assert outcome(steps, during, scribbles, is_native=True, expect_launches=True) == by_one


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_native", [False, True])
@settings(max_examples=40, deadline=None)
@given(flip_at=st.integers(1, 40), slot=SLOTS, state=STATES.filter(lambda state: state != RegionWord.ACTIVE))
def test_no_launch_begins_behind_a_look_that_sees_the_flip(
    is_native: bool, flip_at: int, slot: int, state: int
) -> None:
    """While launch number `flip_at` begins, any of the regions is flipped."""
    with region_rig(is_native=is_native) as made:
        play = Play(made, {flip_at: ("word", slot, state, True)})
        frames: list[Callable[[], bytes]] = [
            lambda tag=tag: quiet_in(made.launch(play.sets[0], 0, tag), tag)  # type: ignore[misc]  # bound now
            for tag in range(1, 50)
        ]
        made.feed(b"".join(frame() for frame in frames))
        assert [entry[4] for entry in made.context.launches] == list(range(1, flip_at + 1))
