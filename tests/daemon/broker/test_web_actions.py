"""A taken-over web process changes nothing without the operator's token, whatever it sends."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fuzz.draws import Draws
from fuzz.tenants import Peer, Scene
from fuzz.virtual import READY_S, VirtualLoop, virtual_time
from gpulease.daemon.broker.web_actions import (
    BY_PAGE,
    MAX_PENDING,
    MAX_WRONG_TOKENS,
    WRONG_TOKEN_S,
    GuessLimiter,
    WebActionHandler,
    WebActionRunner,
)
from gpulease.daemon.leases import LeaseState
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Hello, LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, RevokeOutcome

TOKEN = b"0123456789abcdef0123456789ABCDEF"
DIGEST = hashlib.sha256(TOKEN).digest()


class Page:
    """A web process, and a lease of Ann's in the broker behind it."""

    def __init__(self, scene: Scene, digest: bytes) -> None:
        self.scene = scene
        self.answers: list[dict[str, Any]] = []
        self.refused: list[tuple[str, str, int]] = []
        self.now_s = 0.0
        self.handler = WebActionHandler(WebActionRunner(scene.runtime), digest, lambda: self.now_s)
        (self.lease_id,) = (lease.lease_id for lease in scene.table.snapshots())
        scene.runtime.recorder.refused = lambda *said: self.refused.append(said[:3])  # type: ignore[method-assign]

    def say(self, **changes: Any) -> list[dict[str, Any]]:
        """Ask for the lease's end, but for the changes; what is answered at once."""
        asked = {"op": "revoke", "number": 7, "lease_id": f"{self.lease_id:032x}", "reason": "why", "token": TOKEN}
        before = len(self.answers)
        self.handler.handle(asked | changes, self.answers.append)
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
        assert page.answers == [{"op": "revoked", "number": 7, "outcome": int(RevokeOutcome.TORN_DOWN)}]
        assert page.refused == []

    in_a_broker(lambda page: page.say(), then=check)


@pytest.mark.parametrize("token", [b"", TOKEN[:-1], TOKEN + b"\n", DIGEST, TOKEN.lower(), b"x" * (1 << 20)])
def test_without_it_none(token: bytes) -> None:
    def play(page: Page) -> None:
        (answer,) = page.say(token=token)
        assert (answer["op"], answer["why"]) == ("refused", "wrong_token")
        assert page.refused == [("LEASE_REVOKE", BY_PAGE, page.lease_id)]
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play)


@pytest.mark.parametrize("token", [b"", TOKEN])
def test_a_daemon_without_a_token_ends_none_by_its_page(token: bytes) -> None:
    def play(page: Page) -> None:
        assert page.say(token=token)[0]["why"] == "wrong_token"
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play, digest=b"")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"op": "token"},
        {"op": ["revoke"]},
        {"number": "7"},
        {"number": -1},
        {"number": 1 << 32},
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
def test_what_no_honest_process_says(changes: dict[str, Any]) -> None:
    def play(page: Page) -> None:
        assert page.say(**changes) == []
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play)


def test_guesses_are_few() -> None:
    def play(page: Page) -> None:
        whys = [page.say(token=b"%d" % number)[0]["why"] for number in range(1000)]
        assert whys == ["wrong_token"] * MAX_WRONG_TOKENS + ["too_many"] * (1000 - MAX_WRONG_TOKENS)
        assert len(page.refused) == MAX_WRONG_TOKENS, "nor does it fill the log"
        assert page.say()[0]["why"] == "too_many", "the right one tells it nothing now"
        assert page.state is LeaseState.ACTIVE
        page.now_s += WRONG_TOKEN_S
        assert page.say() == [], "it is being ended"

    in_a_broker(play, then=lambda page: check_over(page))


def check_over(page: Page) -> None:
    assert page.answers[-1]["op"] == "revoked"


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
        answers = [page.say(number=number) for number in range(MAX_PENDING + 1)]
        assert answers[:-1] == [[]] * MAX_PENDING
        assert answers[-1][0]["why"] == "too_many"

    def again(page: Page) -> None:
        assert len(page.answers) == MAX_PENDING + 1
        page.say()
        assert page.answers[-1]["op"] == "revoked"

    in_a_broker(play, then=again)


DRAIN = {"op": "drain", "within_ms": 60_000}
END = {"op": "drain", "within_ms": None}
CLEAR = {"op": "clear_fences", "card": "GPU-of-nobody"}


def test_with_the_token_it_drains_and_ends_the_drain() -> None:
    def play(page: Page) -> None:
        by: list[str] = []
        page.scene.runtime.history.asked_by = lambda request, peer: by.append(peer)  # type: ignore[method-assign]
        page.say(**DRAIN)
        assert page.scene.table.drain_ns is not None
        page.say(**END)
        assert page.scene.table.drain_ns is None
        page.say(**CLEAR)
        assert by == [BY_PAGE] * 3

    def check(page: Page) -> None:
        begun, ended, cleared = page.answers
        assert (begun["op"], begun["number"], begun["leases"]) == ("drain_set", 7, 1)
        assert begun["left_ms"] is not None
        assert (ended["op"], ended["left_ms"]) == ("drain_set", None)
        assert (cleared["op"], cleared["why"]) == ("refused", "denied"), "there is no such card"
        assert page.state is LeaseState.ACTIVE

    in_a_broker(play, then=check)


@pytest.mark.parametrize(("changes", "operation"), [(DRAIN, "DRAIN"), (END, "DRAIN_CANCEL"), (CLEAR, "FENCE_CLEAR")])
def test_without_it_it_does_neither(changes: dict[str, Any], operation: str) -> None:
    def play(page: Page) -> None:
        (answer,) = page.say(**changes, token=TOKEN[::-1])
        assert (answer["op"], answer["why"]) == ("refused", "wrong_token")
        assert page.refused == [(operation, BY_PAGE, 0)]
        assert page.scene.table.drain_ns is None

    in_a_broker(play)


def test_another_token() -> None:
    def play(page: Page) -> None:
        page.handler.set_token(hashlib.sha256(b"other").digest())
        assert page.say()[0]["why"] == "wrong_token"
        assert page.say(token=b"other") == []

    in_a_broker(play, then=check_over)
