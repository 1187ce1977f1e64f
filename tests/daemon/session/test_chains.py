"""Launches that follow each other are queued together, and nothing else differs from queueing them one by one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.session import connection
from gpulease.daemon.session.native import launch_fast_path
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Handle
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.ring import RingLayout
from helpers.ring_pair import Pair, pair
from helpers.session_rig import LEASE, OF_THE_MOMENT, args, launch_of, quiet, sync

KERNELS = ("scale", "bias")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_fast_path, "GATHER_AFTER", 8)
    monkeypatch.setattr(connection, "RING_LAYOUT", RingLayout(1 << 16, 4096))
    monkeypatch.setattr(connection, "SPIN_NS", 1000)


@pytest.fixture(name="made")
def _made() -> Iterator[Pair]:
    with pair(is_native=True, has_chains=True) as made:
        made.made.context.does_them = False
        yield made


def burst(made: Pair, kernels: list[str], counts: list[int], first: int) -> bytes:
    frames = []
    for number, count in enumerate(counts):
        plain = launch_of(made.made, kernels[number % len(kernels)])
        frames.append(quiet(replace(plain, args=args(made.made, count)), first + number))
    return b"".join(frames)


def shown(made: Pair) -> tuple[object, ...]:
    """What a session did, but for the launches' numbers: of a chain's only the last is told."""
    counters = {counter: made.made.page.counter(counter) for counter in set(Counter) - OF_THE_MOMENT}
    return [(*shape, params[8:]) for *shape, params, _ in made.made.context.launches], counters, bytes(made.heard)


@settings(max_examples=25, deadline=None)
@given(
    bursts=st.lists(
        st.tuples(
            st.lists(st.sampled_from(KERNELS), min_size=1, max_size=3),
            st.lists(st.integers(0, 3), min_size=1, max_size=40),
            st.booleans(),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_chains_do_what_launches_do(bursts: list[tuple[list[str], list[int], bool, bool]]) -> None:
    outcomes = []
    for has_chains in (False, True):
        with pair(is_native=True, has_chains=has_chains) as made:
            made.made.context.does_them = False
            number = 1
            made.put(burst(made, ["scale", "bias"], [1] * 40, number))
            for kernels, counts, is_synced, is_refused in bursts:
                made.made.context.refuses_chains = is_refused
                made.put(burst(made, kernels, counts, 1000 * number) + sync(1000 * number + 999) * is_synced)
                number += 1
            outcomes.append(shown(made))
    assert outcomes[0] == outcomes[1]


def test_a_loop_is_queued_in_chains_with_each_launchs_own_arguments(made: Pair) -> None:
    made.put(burst(made, ["scale", "bias"], [1] * 24, 1))
    before = len(made.made.context.launches)
    made.put(burst(made, ["scale", "bias"], list(range(40)), 100))
    launches = made.made.context.launches[before:]
    assert [int.from_bytes(params[8:12], "little") for *_, params, _ in launches] == list(range(40))
    assert made.made.context.replayed >= 32
    assert made.made.page.counter(Counter.LAUNCHES) == 64


def test_the_lease_is_looked_at_before_each_chain(made: Pair) -> None:
    made.put(burst(made, ["scale"], [1] * 24, 1))
    replay = made.made.context.replay
    count = len(made.made.context.launches)
    made.requests.put(burst(made, ["scale"], [1] * 64, 100))
    launch = made.made.context.launch

    def revoke_at_the_first(*shape: object) -> None:
        launch(*shape)  # type: ignore[arg-type]  # as it came
        made.made.page.refuse(Status.REVOKED)

    made.made.context.launch = revoke_at_the_first  # type: ignore[method-assign, assignment]
    made.turn()
    assert replay is not None
    assert len(made.made.context.launches) - count <= 16


def test_a_module_that_goes_takes_its_chains_with_it(made: Pair) -> None:
    made.put(burst(made, ["scale"], [1] * 24, 1))
    chains = made.made.context.chains
    assert chains
    unload = build_frame(Opcode.MODULE_UNLOAD, build_body(Handle(made.made.module)), request_id=200, session_id=LEASE)
    made.put(unload)
    assert all(chain.is_closed for chain in chains)
