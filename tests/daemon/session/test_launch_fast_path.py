"""Launches that come as expected are taken without parsing; nothing else may differ from handling them one by one.

All of it holds for native code as for Python, which is its reference.
"""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import Dim3, DriverKernel
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import build_frame
from gpulease.protocol.opcodes import Opcode, Status
from helpers.session_rig import KINDS, LEASE, Rig, launch_of, quiet, rig, stream_of, sync, told, without_addresses


@pytest.fixture(name="made", params=["python", "native"])
def _made(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rig(is_native=request.param == "native") as made:
        yield made


def outcome(made: Rig, stream: bytes, cuts: list[int], *, expect_launches: bool) -> tuple[object, ...]:
    """All that a session shows to the outside, without addresses and the time of its last look."""
    end = ""
    try:
        for cut in cuts:
            made.feed(stream[:cut], expect_launches=expect_launches)
            stream = stream[cut:]
        made.feed(stream, expect_launches=expect_launches)
    except FramingError as error:
        end = str(error)
    return end, made.reader.end - made.reader.start, list(map(without_addresses, made.replies)), told(made)


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(KINDS, max_size=40),
    cuts=st.lists(st.integers(1, 400), max_size=12),
    flips=st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 255)), max_size=3),
)
def test_expected_launches_are_done_as_any_other(
    kinds: list[str], cuts: list[int], flips: list[tuple[int, int]]
) -> None:
    outcomes = []
    for is_native, expect_launches in ((False, False), (False, True), (True, True)):
        with rig(is_native=is_native) as made:
            # A stray address would be reported sooner or later, as it happens.
            made.context.does_them = not flips
            stream = bytearray(stream_of(made, kinds))
            for place, bits in flips:
                if place < len(stream):
                    stream[place] ^= bits
            outcomes.append(outcome(made, bytes(stream), cuts, expect_launches=expect_launches))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_native_code_does_what_it_can() -> None:
    with rig(is_native=True) as made:
        made.feed(stream_of(made, ["scale", "bias", "gaps"] * 10), expect_launches=True)
        assert len(made.context.launches) == 30
        # Three are planned first, and the fourth shows what follows what.
        assert made.context.taken_natively == 26


def test_a_launch_without_a_number_is_left_where_it_is(made: Rig) -> None:
    made.feed(quiet(launch_of(made), 1), expect_launches=True)
    with pytest.raises(FramingError, match="request id 0"):
        made.feed(quiet(launch_of(made), 0), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1]


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


@pytest.mark.exhaustive
def test_a_refused_expected_launch_is_kept_and_what_is_behind_it_skipped(made: Rig) -> None:
    made.context.refuse_tag = 4
    made.feed(b"".join(quiet(launch_of(made), number) for number in range(1, 9)) + sync(9), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1, 2, 3]
    assert len(made.replies) == 1
    assert b"refused for the test" in made.replies[0]
    assert made.page.counter(Counter.LAUNCHES) == 3
    made.feed(quiet(launch_of(made), 10) + sync(11), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1, 2, 3, 10]


@pytest.mark.exhaustive
def test_a_kernel_refused_at_its_first_launch_is_charged_again(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(made.session._ledger, "charge_kept", charged.append)
    made.context.refuse_tag = 2
    made.feed(b"".join(quiet(launch_of(made), number) for number in (1, 1, 1)), expect_launches=True)
    assert len(charged) == 1
    wide = launch_of(made, blocks=2)
    made.feed(quiet(wide, 2) + sync(3) + quiet(wide, 4) * 2 + sync(5), expect_launches=True)
    assert len(charged) == 3
    assert [entry[4] for entry in made.context.launches] == [1, 1, 1, 4, 4]


@pytest.mark.exhaustive
def test_launches_stop_at_the_look_that_sees_the_revocation(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is revoked while a launch is being queued: no other begins, though all have arrived."""
    launch = made.context.launch

    def flip_at_ten(kernel: DriverKernel, grid: Dim3, block: Dim3, shared: int, params: bytes, tag: int) -> None:
        launch(kernel, grid, block, shared, params, tag)
        if tag == 10:
            made.page.refuse(Status.REVOKED)

    monkeypatch.setattr(made.context, "launch", flip_at_ten)
    made.feed(b"".join(quiet(launch_of(made), number) for number in range(1, 100)) + sync(100), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == list(range(1, 11))
    assert len(made.replies) == 1


@pytest.mark.exhaustive
def test_an_unloaded_module_is_expected_no_more(made: Rig) -> None:
    made.feed(quiet(launch_of(made), 1), expect_launches=True)
    unload = build_frame(Opcode.MODULE_UNLOAD, made.module.to_bytes(8, "big"), request_id=2, session_id=LEASE)
    made.feed(unload + quiet(launch_of(made), 3) + sync(4), expect_launches=True)
    assert [entry[4] for entry in made.context.launches] == [1]
    assert b"is not a loaded module" in made.replies[-1]
