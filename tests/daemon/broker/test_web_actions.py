"""A taken-over web process changes nothing without the operator's token, whatever it sends."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fuzz.draws import Draws
from fuzz.tenants import Peer, Scene
from fuzz.virtual import READY_S, VirtualLoop, virtual_time
from gpulease.daemon.broker.runtime import OnResult
from gpulease.daemon.broker.web_actions import (
    BY_PAGE,
    MAX_PENDING,
    MAX_WRONG_TOKENS,
    WRONG_TOKEN_S,
    GuessLimiter,
    WebActionHandler,
    WebActionRunner,
)
from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message
from gpulease.daemon.leases.events import FreeDone, RevokeDone
from gpulease.daemon.leases.model import LeaseState
from gpulease.daemon.web.web_messages import (
    FROM_WEB,
    ActionOutcome,
    ActionRefused,
    ChangeDrain,
    ClearFences,
    DrainChanged,
    FromWeb,
    LeaseRevokedReply,
    RevokeLease,
    WebRefusal,
)
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Hello, LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, RevokeOutcome
from helpers.process_messages import FROM_WEB as FROM_WEB_MESSAGES
from helpers.web_rig import Scene as Actions

TOKEN = b"0123456789abcdef0123456789ABCDEF"
DIGEST = hashlib.sha256(TOKEN).digest()


class Page:
    """A web process, and a lease of Ann's in the broker behind it."""

    def __init__(self, scene: Scene, digest: bytes) -> None:
        self.scene = scene
        self.answers: list[Any] = []
        self.refused: list[tuple[str, str, int]] = []
        self.now_s = 0.0
        self.handler = WebActionHandler(WebActionRunner(scene.runtime), digest, lambda: self.now_s)
        (self.lease_id,) = (lease.lease_id for lease in scene.table.snapshots())
        scene.runtime.recorder.refused = lambda *said: self.refused.append(said[:3])  # type: ignore[method-assign]

    def say(self, asked: FromWeb | None = None, *, token: bytes = TOKEN) -> list[Any]:
        """Ask, for the lease's end unless it is something else; what is answered at once."""
        before = len(self.answers)
        asked = asked or RevokeLease(7, token, f"{self.lease_id:032x}", "why")
        self.handler.handle(replace(asked, token=token), self.answers.append)
        return self.answers[before:]

    @property
    def state(self) -> LeaseState | None:
        lease = self.scene.table.get(self.lease_id)
        return None if lease is None else lease.state


Play = Callable[[Page], object]


@contextmanager
def broker_with_page(digest: bytes) -> Iterator[tuple[VirtualLoop, Page]]:
    loop, scenes = VirtualLoop(), list[Scene]()

    async def begin() -> Page:
        scene = Scene(Draws(b""))
        scenes.append(scene)
        ann = Peer(scene, "ann")
        ann.ask(Opcode.HELLO, Hello(0, "ann", ()))
        ann.ask(Opcode.LEASE_ALLOC, LeaseAlloc(GPU_RESOURCE_TYPE, 100, 8000, 0, None, ()))
        await asyncio.sleep(READY_S * 3)
        return Page(scene, digest)

    async def end() -> None:
        for scene in scenes:
            await scene.runtime.stop()
            for fd in scene.places.values():
                os.close(fd)

    try:
        with virtual_time(loop):
            yield loop, loop.run_until_complete(begin())
            loop.run_until_complete(end())
            assert not loop.wrong, loop.wrong[0]
    finally:
        loop.close()


def in_a_broker(play: Play, digest: bytes = DIGEST, then: Play = lambda _: None) -> None:
    async def run(page: Page) -> None:
        play(page)
        await asyncio.sleep(2)
        then(page)

    with broker_with_page(digest) as (loop, page):
        loop.run_until_complete(run(page))


def test_with_the_token_it_ends_a_lease() -> None:
    def check(page: Page) -> None:
        assert page.state is not LeaseState.ACTIVE
        assert page.answers == [LeaseRevokedReply(7, RevokeOutcome.TORN_DOWN)]
        assert page.refused == []

    in_a_broker(lambda page: page.say(), then=check)


@pytest.mark.parametrize("token", [b"", TOKEN[:-1], TOKEN + b"\n", DIGEST, TOKEN.lower(), b"x" * (1 << 20)])
def test_without_it_none(token: bytes) -> None:
    def play(page: Page) -> None:
        (answer,) = page.say(token=token)
        assert answer.why is WebRefusal.WRONG_TOKEN
        assert page.refused == [("LEASE_REVOKE", BY_PAGE, page.lease_id)]
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play)


@pytest.mark.parametrize("token", [b"", TOKEN])
def test_a_daemon_without_a_token_ends_none_by_its_page(token: bytes) -> None:
    def play(page: Page) -> None:
        assert page.say(token=token)[0].why is WebRefusal.WRONG_TOKEN
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play, digest=b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "token"},
        {"op": ["revoke"]},
        {"number": "7"},
        {"number": -1},
        {"number": 1 << 64},
        {"lease_id": 5},
        {"lease_id": "5"},
        {"lease_id": "G" * 32},
        {"lease_id": "0" * 32 + "\n"},
        {"reason": None},
        {"reason": "x" * 513},
        {"op": "drain"},
        {"op": "drain", "within_ms": -1},
        {"op": "drain", "within_ms": 1 << 32},
        {"op": "drain", "within_ms": "1"},
        {"op": "clear_fences"},
        {"op": "clear_fences", "card": ""},
        {"op": "clear_fences", "card": "GPU-1\n"},
        {"op": "clear_fences", "card": "x" * 65},
        {"token": TOKEN.decode()},
        {"token": None},
    ],
)
def test_a_request_that_no_honest_process_sends_is_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        expect_message(FROM_WEB, RevokeLease(7, TOKEN, "0" * 32, "why").to_map() | changes)


def test_a_fault_of_an_action_is_raised_and_frees_its_place() -> None:
    """The caller answers then; an outcome that comes all the same is not a second answer."""

    def play(page: Page) -> None:
        outcomes: list[OnResult] = []

        def fail(lease_id: int, reason: str, on_outcome: OnResult) -> None:
            outcomes.append(on_outcome)
            raise ZeroDivisionError

        page.handler._actions.revoke = fail  # type: ignore[method-assign]
        for _ in range(MAX_PENDING + 1):
            with pytest.raises(ZeroDivisionError):
                page.say()
        outcomes[0](RevokeDone(0, RevokeOutcome.TORN_DOWN))
        assert (page.answers, page.handler._pending) == ([], 0)

    in_a_broker(play)


def test_an_outcome_that_no_action_has_is_a_refusal() -> None:
    """The page waits, and nothing else would answer it."""
    answers: list[ActionOutcome] = []
    handler = WebActionHandler(Actions(outcome=FreeDone(0, None)), DIGEST)  # type: ignore[arg-type]
    handler.handle(RevokeLease(7, TOKEN, "0" * 32, "why"), answers.append)
    assert [isinstance(answer, ActionRefused) and answer.why for answer in answers] == [WebRefusal.FAILED]


def test_guesses_are_few() -> None:
    def play(page: Page) -> None:
        whys = [page.say(token=b"%d" % number)[0].why for number in range(1000)]
        assert whys == [WebRefusal.WRONG_TOKEN] * MAX_WRONG_TOKENS + [WebRefusal.TOO_MANY] * (1000 - MAX_WRONG_TOKENS)
        assert len(page.refused) == MAX_WRONG_TOKENS, "nor does it fill the log"
        assert page.say()[0].why is WebRefusal.TOO_MANY, "the right one tells it nothing now"
        assert page.state is LeaseState.ACTIVE
        page.now_s += WRONG_TOKEN_S
        assert page.say() == [], "it is being ended"

    in_a_broker(play, then=lambda page: check_over(page))


def check_over(page: Page) -> None:
    assert isinstance(page.answers[-1], LeaseRevokedReply)


def test_guesses_come_back_and_no_more_than_there_may_be() -> None:
    now_s = [0.0]
    guesses = GuessLimiter(lambda: now_s[0])
    for pause_s, expected in ((0, MAX_WRONG_TOKENS), (WRONG_TOKEN_S, 1), (3600, MAX_WRONG_TOKENS)):
        now_s[0] += pause_s
        looked = 0
        while guesses.may_check():
            guesses.count_wrong()
            looked += 1
        assert looked == expected


def test_revocations_under_way_are_bounded_and_given_back() -> None:
    def play(page: Page) -> None:
        answers = [page.say() for _ in range(MAX_PENDING + 1)]
        assert answers[:-1] == [[]] * MAX_PENDING
        assert answers[-1][0].why is WebRefusal.TOO_MANY

    def again(page: Page) -> None:
        assert len(page.answers) == MAX_PENDING + 1
        page.say()
        assert isinstance(page.answers[-1], LeaseRevokedReply)

    in_a_broker(play, then=again)


DRAIN = ChangeDrain(7, TOKEN, 60_000, "")
END = ChangeDrain(7, TOKEN, None, "")
CLEAR = ClearFences(7, TOKEN, "GPU-of-nobody")


def test_with_the_token_it_drains_a_card_and_ends_that() -> None:
    def play(page: Page) -> None:
        uuid = page.scene.table.cards()[0].uuid
        page.say(ChangeDrain(7, TOKEN, 60_000, uuid))
        assert (page.scene.table.drain_ns, page.scene.table.drain_ns_of(uuid) is None) == (None, False)
        page.say(ChangeDrain(7, TOKEN, None, uuid))
        assert page.scene.table.drain_ns_of(uuid) is None
        page.say(ChangeDrain(7, TOKEN, None, "GPU-of-nobody"))

    def check(page: Page) -> None:
        begun, ended, refused = page.answers
        assert (begun.left_ms is None, ended.left_ms) == (False, None)
        assert refused.why is WebRefusal.DENIED, "there is no such card"

    in_a_broker(play, then=check)


def test_with_the_token_it_drains_and_ends_the_drain() -> None:
    def play(page: Page) -> None:
        by: list[str] = []
        page.scene.runtime.history.note_requester = lambda request, peer: by.append(peer)  # type: ignore[method-assign]
        page.say(DRAIN)
        assert page.scene.table.drain_ns is not None
        page.say(END)
        assert page.scene.table.drain_ns is None
        page.say(CLEAR)
        assert by == [BY_PAGE] * 3

    def check(page: Page) -> None:
        begun, ended, cleared = page.answers
        assert begun == DrainChanged(7, begun.left_ms, 1)
        assert begun.left_ms is not None
        assert ended == DrainChanged(7, None, 1)
        assert cleared.why is WebRefusal.DENIED, "there is no such card"
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play, then=check)


@pytest.mark.parametrize(("asked", "operation"), [(DRAIN, "DRAIN"), (END, "DRAIN_CANCEL"), (CLEAR, "FENCE_CLEAR")])
def test_without_it_it_does_neither(asked: FromWeb, operation: str) -> None:
    def play(page: Page) -> None:
        (answer,) = page.say(asked, token=TOKEN[::-1])
        assert answer.why is WebRefusal.WRONG_TOKEN
        assert page.refused == [(operation, BY_PAGE, 0)]
        assert page.scene.table.drain_ns is None

    in_a_broker(play)


def test_every_request_of_the_web_process_is_answered() -> None:
    def play(page: Page) -> None:
        for message in FROM_WEB_MESSAGES.messages:
            page.say(message)  # type: ignore[arg-type]

    def check(page: Page) -> None:
        assert sorted(answer.request for answer in page.answers) == [1, 2, 3]

    in_a_broker(play, then=check)


def test_another_token() -> None:
    def play(page: Page) -> None:
        page.handler.set_token(hashlib.sha256(b"other").digest())
        assert page.say()[0].why is WebRefusal.WRONG_TOKEN
        assert page.say(token=b"other") == []

    in_a_broker(play, then=check_over)
