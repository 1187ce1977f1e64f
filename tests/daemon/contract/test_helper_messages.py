"""Messages between the broker and its helper processes: every one arrives whole, and nothing else is taken."""

import re
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.contract.message_fields import (
    MalformedMessage,
    Message,
    expect_message,
    messages_of,
    request_of,
)
from gpulease.daemon.contract.messages import LivenessPing, Pong, Ready
from gpulease.daemon.fleet.rules.fleet_events import ClaimDropped, ClaimEnded, QuotaDropped
from gpulease.daemon.web.web_messages import ClearFences
from helpers.process_messages import DIRECTIONS, Direction
from helpers.source_files import SOURCES, name_of

MESSAGES = [(direction, message) for direction in DIRECTIONS.values() for message in direction.messages]
CASES = [pytest.param(*case, id=f"{type(case[1]).__name__}-{number}") for number, case in enumerate(MESSAGES)]
MAP = re.compile(r"\"op\": *[\"'f]")
"""The beginning of a message that is written as a map."""
PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
VALUES = PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), PLAIN)


def sent(message: Message) -> dict[str, Any]:
    received: dict[str, Any] = msgpack.unpackb(msgpack.packb(message.to_map()))
    return received


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_every_message_has_an_instance_here(direction: Direction) -> None:
    assert {type(message) for message in direction.messages} == set(direction.ops.values())


def test_each_message_round_trips() -> None:
    for more in ({}, {"colour": "blue"}):
        read = [expect_message(direction.ops, sent(message) | more) for direction, message in MESSAGES]
        assert dict(enumerate(read)) == {number: message for number, (_, message) in enumerate(MESSAGES)}


@pytest.mark.parametrize(("direction", "message"), CASES)
def test_a_field_of_another_type_or_out_of_bounds_is_refused(direction: Direction, message: Message) -> None:
    received = sent(message)
    for key in received.keys() - {"op"}:
        value = received[key]
        beyond = [-1, 1 << 64] if type(value) is int else []
        wrongs: list[object] = ["1.5" if type(value) is float else 1.5, [{}], float("nan"), *beyond]
        for wrong in wrongs:
            with pytest.raises(MalformedMessage, match=key) as failure:
                expect_message(direction.ops, received | {key: wrong})
            assert failure.value.op == received["op"]


@given(case=st.sampled_from(MESSAGES), data=st.data())
def test_foreign_values_are_refused_as_malformed(case: tuple[Direction, Message], data: st.DataObject) -> None:
    direction, message = case
    received = sent(message)
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(received)), VALUES, min_size=1))
    with suppress(MalformedMessage):
        expect_message(direction.ops, received | changed)


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("op", ["tomorrow's", "", "x" * 100_000, None, 1, ["ready"], {}])
def test_an_unknown_op_is_refused(direction: Direction, op: object) -> None:
    for received in ({"op": op}, {}):
        with pytest.raises(MalformedMessage, match="the op must be one of"):
            expect_message(direction.ops, received)


def test_a_token_of_the_wrong_type_is_not_shown() -> None:
    received = sent(ClearFences(3, b"", "GPU-a")) | {"token": "secret"}
    with pytest.raises(MalformedMessage, match="token: it must be of type bytes, not str") as failure:
        expect_message({ClearFences.OP: ClearFences}, received)
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("received", "number"),
    [({"number": 5}, 5), ({}, None), ({"number": True}, None), ({"number": -1}, None), ({"number": 1 << 64}, None)],
)
def test_the_request_of_a_message_that_can_t_be_read(received: dict[str, Any], number: int | None) -> None:
    assert request_of(received) == number


def test_no_process_writes_a_message_as_a_map() -> None:
    found = [name_of(path) for path in SOURCES if MAP.search(path.read_text(encoding="utf-8"))]
    assert [name for name in found if name.startswith("daemon/")] == []


def test_two_messages_of_one_op_are_refused() -> None:
    class Twin(ClaimDropped):
        pass

    assert messages_of(LivenessPing | Pong | Ready | ClaimDropped | ClaimEnded | QuotaDropped).keys() == {
        "ping",
        "pong",
        "ready",
        "drop",
        "ended",
        "drop_count",
    }
    with pytest.raises(TypeError, match="the same op"):
        messages_of(ClaimDropped | Twin)
