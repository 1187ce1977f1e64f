"""A sync by the ring's words: answered once all that was sent has ended, and never for what was not taken yet."""

import os
from collections.abc import Iterator

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.session import connection, region_operations
from gpulease.protocol.opcodes import Status
from helpers.region_rig import PageWriter
from helpers.ring_pair import SMALL, Pair, pair
from helpers.session_rig import launch_of, quiet, sync

AWAITED, ANSWER = 1, 33


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(connection, "RING_LAYOUT", SMALL)
    monkeypatch.setattr(connection, "SPIN_NS", 1000)
    with pair(is_native=True) as made:
        made.put(quiet(launch_of(made.made), 1) * 2 + sync(2))
        made.made.context.does_them = False
        yield made


def test_it_is_answered_behind_what_was_sent(made: Pair) -> None:
    launches = made.made.page.counter(Counter.LAUNCHES)
    syncs = made.made.page.counter(Counter.SYNCS)
    made.words[AWAITED] = 7
    made.put(quiet(launch_of(made.made), 3) * 3)
    assert made.words[ANSWER] == 15
    assert made.made.page.counter(Counter.LAUNCHES) == launches + 3
    assert made.made.page.counter(Counter.SYNCS) == syncs + 1
    assert made.made.session._fast_path.synced == launches + 3
    made.turn()
    assert made.made.page.counter(Counter.SYNCS) == syncs + 1
    made.words[AWAITED] = 2**63 + 9
    made.turn()
    assert made.words[ANSWER] == 19


def test_after_the_lease_it_is_left_to_a_sync(made: Pair) -> None:
    made.made.page.refuse(Status.REVOKED)
    made.words[AWAITED] = 7
    made.turn()
    assert made.words[ANSWER] == 14


def test_behind_a_failure_it_is_left_to_a_sync_at_once(made: Pair) -> None:
    made.made.context.refuse_tag = 9
    made.words[AWAITED] = 10
    made.put(quiet(launch_of(made.made), 9))
    made.turn()
    assert made.words[ANSWER] == 20
    made.words[AWAITED] = 2**63 + 5
    made.turn()
    assert made.words[ANSWER] == 10


def test_it_is_answered_while_regions_open_or_end(made: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_operations, "SETTLE_NS", 1 << 60)
    page = PageWriter()
    reading_fd = page.reading_fd()
    made.made.session.regions.use_page(reading_fd)
    os.close(reading_fd)
    assert not made.made.session.regions.is_moving(), "a session that never had a region has no reason to look around"
    made.made.session._gate.had_any = True
    assert made.made.session.regions.is_moving()
    made.words[AWAITED] = 7
    made.turn()
    assert made.words[ANSWER] == 15
    page.close()
    made.made.session.regions.close()
    in_session = made.made.session._gate.page
    assert in_session is not None
    in_session.close()
