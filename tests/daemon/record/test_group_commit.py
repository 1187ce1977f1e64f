"""Groups are committed whole and in order, and a reply is told only when what it says is durable."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from gpulease.daemon.leases.denials import not_kept
from gpulease.daemon.leases.events import Event, Granted, RequestDenied, RevokeRequested
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseState
from gpulease.daemon.record import group_commit
from gpulease.daemon.record.group_commit import CommitTarget, DurableReplies, GroupCommitter
from gpulease.protocol.opcodes import Exclusivity
from helpers.waiting import wait_until

LEASE = LeaseSnapshot(
    7, "ann", "GPU-a", 10, Exclusivity.SHARED, 1, LeaseState.ACTIVE, None, "", "", 1, None, None, 1000
)


class Target(CommitTarget[int]):
    """A disk that can hang or refuse."""

    thread_name = "gpulease-test"
    work = "a test"
    doing = "testing"
    max_group = 4

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.events: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.error: Exception | None = None

    def commit(self, group: Sequence[int]) -> None:
        assert self.may_go_on.wait(60)
        if self.error is not None:
            raise self.error
        self.groups.append(list(group))

    def on_failure(self, error: Exception, problem: str, *, is_first: bool) -> None:
        self.events.append(f"failed: {problem}" if is_first else "failed again")

    def on_recovery(self) -> None:
        self.events.append("recovered")

    def close(self) -> None:
        self.events.append("closed")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.01)
    return Target()


def test_items_that_gather_during_a_commit_are_the_next_groups(target: Target) -> None:
    committer = GroupCommitter(target)
    committer.start(lambda: None)
    target.may_go_on.clear()
    tickets = [committer.put(number) for number in range(9)]
    assert tickets == list(range(1, 10))
    assert committer.durable == 0
    target.may_go_on.set()
    assert committer.stop()
    assert [number for group in target.groups for number in group] == list(range(9))
    assert max(map(len, target.groups)) <= 4
    assert (committer.durable, committer.accepted, target.events) == (9, 9, ["closed"])


def let_committer_run() -> None:
    """Block the loop for a while, in which the committer's thread could take items."""
    time.sleep(0.02)


def test_items_of_one_turn_of_the_loop_are_one_group(target: Target) -> None:
    async def put_all() -> None:
        committer.start(lambda: None)
        for number in range(3):
            committer.put(number)
            let_committer_run()

    committer = GroupCommitter(target)
    asyncio.run(put_all())
    assert committer.stop()
    assert target.groups == [[0, 1, 2]]


def test_an_item_after_a_single_one_is_committed_at_once(target: Target) -> None:
    async def put_one_by_one() -> None:
        committer.start(lambda: None)
        committer.put(0)
        await asyncio.to_thread(wait_until, lambda: committer.durable == 1, "it is committed")
        committer.put(1)
        # Wait in the loop's thread, so that this turn does not end before.
        wait_until(lambda: committer.durable == 2, "it is committed")

    committer = GroupCommitter(target)
    asyncio.run(put_one_by_one())
    assert committer.stop()
    assert target.groups == [[0], [1]]


def test_a_busy_loop_gathers_until_a_turn_without_items(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put_in_turns() -> None:
        committer.start(lambda: None)
        committer.put(0)
        for number in range(1, 4):
            committer.put(number)
            await asyncio.sleep(0)
            let_committer_run()
        assert committer.durable == 0
        await asyncio.to_thread(wait_until, lambda: committer.durable == 4, "they are committed")

    monkeypatch.setattr(group_commit, "GATHER_LIMIT_S", 600.0)
    committer = GroupCommitter(target)
    asyncio.run(put_in_turns())
    assert committer.stop()
    assert target.groups == [[0, 1, 2, 3]]


def test_a_loop_that_stays_busy_gathers_for_a_bounded_time(target: Target) -> None:
    async def put_forever() -> None:
        committer.start(lambda: None)
        while not committer.durable:
            committer.put(0)
            committer.put(0)
            await asyncio.sleep(0)

    committer = GroupCommitter(target)
    asyncio.run(put_forever())
    assert committer.stop()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("a bug")])
def test_a_group_that_failed_is_tried_again_before_any_other(target: Target, error: Exception) -> None:
    committer = GroupCommitter(target)
    committer.start(lambda: None)
    target.error = error
    committer.put(1)
    problem = wait_until(committer.problem, "it fails")
    committer.put(2)
    assert problem == ("No space left on device" if isinstance(error, OSError) else "a bug")
    assert committer.durable == 0
    target.error = None
    wait_until(lambda: committer.durable == 2, "it goes on")
    assert committer.problem() == ""
    assert committer.stop()
    assert [number for group in target.groups for number in group] == [1, 2]
    assert [event for event in target.events if event != "failed again"] == [
        f"failed: {problem}",
        "recovered",
        "closed",
    ]


def test_a_commit_that_hangs_is_a_problem(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "STALLED_AFTER_S", 0.01)
    committer = GroupCommitter(target)
    committer.start(lambda: None)
    target.may_go_on.clear()
    committer.put(1)
    assert wait_until(committer.problem, "it hangs") == "a test has lasted for more than 0.01 s"
    target.may_go_on.set()
    wait_until(lambda: not committer.problem(), "it goes on")
    assert committer.stop()


def test_one_that_never_started_owes_nothing(target: Target) -> None:
    committer = GroupCommitter(target)
    committer.put(1)
    assert committer.stop()
    assert (target.groups, target.events) == ([], ["closed"])


class Disk:
    """The part of a committer that replies ask about."""

    def __init__(self) -> None:
        self.durable = 0
        self.problem = ""
        self.posted: list[Event] = []
        self.told: list[tuple[int, str]] = []
        self.replies = DurableReplies(lambda: self.durable, lambda: self.problem)

    def hold(self, ticket: int) -> None:
        self.replies.hold(ticket, lambda problem: self.told.append((ticket, problem)))


def replying(play: Callable[[Disk], None]) -> list[tuple[int, str]]:
    async def run() -> list[tuple[int, str]]:
        disk = Disk()
        disk.replies.attach(disk.posted.append)
        play(disk)
        disk.replies.on_change()
        await asyncio.sleep(0.05)
        return disk.told

    return asyncio.run(run())


def test_a_reply_waits_for_its_ticket_and_overtakes_none() -> None:
    def play(disk: Disk) -> None:
        for ticket in (1, 2, 3):
            disk.hold(ticket)
        assert disk.told == []
        disk.durable = 2

    assert replying(play) == [(1, ""), (2, "")]


def test_a_problem_ends_every_wait_but_not_what_is_durable() -> None:
    def play(disk: Disk) -> None:
        for ticket in (1, 2, 3):
            disk.hold(ticket)
        disk.durable, disk.problem = 1, "it is full"
        disk.hold(4)
        disk.hold(1)
        assert disk.told == [(4, "it is full"), (1, "")]

    assert replying(play)[2:] == [(1, ""), (2, "it is full"), (3, "it is full")]


def test_a_reply_waits_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "MAX_WAIT_S", 0.01)
    assert replying(lambda disk: disk.hold(1)) == [(1, "it took more than 0.01 s")]


def test_what_has_no_time_limit_happens_once_the_disk_works_again() -> None:
    def play(disk: Disk) -> None:
        disk.replies.hold_until_durable(2, lambda: disk.told.append((2, "at last")))
        disk.problem = "it is full"
        disk.replies._release()
        assert disk.told == []
        disk.durable, disk.problem = 2, ""
        disk.replies.hold_until_durable(1, lambda: disk.told.append((1, "at once")))

    assert replying(play) == [(1, "at once"), (2, "at last")]


def test_a_reply_before_the_daemon_has_begun_is_not_told_as_durable() -> None:
    disk = Disk()
    disk.hold(1)
    assert disk.told == [(1, "the daemon has not begun")]


def test_a_reply_that_breaks_costs_the_others_nothing() -> None:
    def play(disk: Disk) -> None:
        def breaks(_: str) -> None:
            raise ZeroDivisionError

        disk.replies.hold(1, breaks)
        disk.hold(2)
        disk.durable = 2

    assert replying(play) == [(2, "")]


def test_a_grant_that_can_not_be_durable_is_revoked_before_it_is_told() -> None:
    def play(disk: Disk) -> None:
        denial = not_kept("it is full")
        assert disk.replies.refuse(Granted(3, LEASE), denial) == RequestDenied(3, denial)
        assert disk.posted == [RevokeRequested(0, 7, denial.message)]

    replying(play)
